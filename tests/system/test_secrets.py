"""Tests that credentials are hidden, and what controls a terminal is escaped; ordinary texts and options are not."""

import os
import time
from pathlib import Path

import pytest

from runner.config.options import CONF
from runner.system.secrets import printable, redacted, redacted_values

TOKEN = "Zx9" + 33 * "k"
HIDDEN = {
    "a URL": ("data.root=https://ann:s3cret@host.org:80/x?y=1", "data.root=https://ann:***@host.org:80/x?y=1"),
    "a URL without a user": ("redis://:s3cret@localhost:6379/0", "redis://:***@localhost:6379/0"),
    "an at sign in a password": ("ftp://ann:s3c@ret@host/x", "ftp://ann:***@host/x"),
    "a token in a URL": (f"https://{TOKEN}@host.org/x.git", "https://***@host.org/x.git"),
    "an option": ("python -m runner data.token=s3cret lr=0.1", "python -m runner data.token=*** lr=0.1"),
    "a quoted option": ("runner 'data.password=s3 cr,et' lr=0.1", "runner 'data.password=*** cr,et' lr=0.1"),
    "a quoted value": ("data.password='s3 cr,et' lr=0.1", "data.password='***' lr=0.1"),
    "an environment variable": ("WANDB_API_KEY=0123456789abcdef runner", "WANDB_API_KEY=*** runner"),
    "an AWS secret key": ("AWS_SECRET_ACCESS_KEY=wJalr/XUtn+FEMI=", "AWS_SECRET_ACCESS_KEY=***"),
    "a query": ("GET /x?access_token=s3cret&page=2", "GET /x?access_token=***&page=2"),
    "an option of a program": ("client --auth-token s3cret --verbose", "client --auth-token *** --verbose"),
    "JSON": ('{"lr": 0.1, "apiKey": "s3cret", "n": 1}', '{"lr": 0.1, "apiKey": "***", "n": 1}'),
    "a Python dict": ("{'password': 's3cret', 'n': 1}", "{'password': '***', 'n': 1}"),
    "YAML": ("lr: 0.1\ndb:\n  client_secret: s3 cr,et\nn: 1\n", "lr: 0.1\ndb:\n  client_secret: ***\nn: 1\n"),
    "YAML with a quoted name": ("n: 1\n  'client.secret': s3 cr,et\n", "n: 1\n  'client.secret': ***\n"),
    "JSON over several lines": ('{\n  "token": "s3 cr,et",\n  "n": 1\n}', '{\n  "token": "***",\n  "n": 1\n}'),
    "a dict of Hydra": ("data={password: s3cret, n: 1}", "data={password: ***, n: 1}"),
    "a dict with a quoted name": ("{'data.password': s3cret, n: 1}", "{'data.password': ***, n: 1}"),
    "a number in JSON": ('{"password": 12345}', '{"password": ***}'),
    "a header": ("Authorization: Basic YW5uOnMzY3JldHMzY3JldA==", "Authorization: ***"),
    "a header on a command line": ("curl -H 'Authorization: Basic YW5u' host", "curl -H 'Authorization: ***' host"),
    "a config error": ("data.token: got 's3 cret': it is too long", "data.token: got '***': it is too long"),
    "a bearer": ("Bearer abcdef0123456789.xyz", "Bearer ***"),
    "a signed URL": ("s3://b/x?X-Amz-Signature=0a1b2c&part=1", "s3://b/x?X-Amz-Signature=***&part=1"),
    "ODBC": ("Server=db;Uid=ann;Pwd=s3cret;Port=1", "Server=db;Uid=ann;Pwd=***;Port=1"),
    "Hugging Face": (f"login hf_{TOKEN} done", "login *** done"),
    "GitHub": (f"ghp_{TOKEN}, github_pat_{TOKEN}", "***, ***"),
    "GitLab": ("glpat-0123456789abcdefghij", "***"),
    "OpenAI": (f"sk-{TOKEN} and sk-proj-{TOKEN}", "*** and ***"),
    "Anthropic": (f"sk-ant-api03-{TOKEN}-{TOKEN}", "***"),
    "AWS": ("id AKIAIOSFODNN7EXAMPLE.", "id ***."),
    "Google": ("AIza" + 35 * "x", "***"),
    "Slack": ("xoxb-123456789012-abcdef", "***"),
    "a JSON Web Token": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN", "***"),
    "a JSON Web Token in a name": ("id-eyJhbGciOiJI-eyJ9.eyJzdWIiOiIxMjM0In0.dozj, a.b", "id-***, a.b"),
    "a private key": (
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
    ),
}  # fmt: skip

ORDINARY = (
    "python -m runner data.root=/data/imagenet:/more parallel=ddp lr=0.1,0.2 seed=12345678901234567890",
    "outputs/classifier/2026-01-02_03-04-05-a1b2c3/checkpoints/step_00000100/model.safetensors",
    "b1c3997d2f3e4a5b6c7d8e9f0a1b2c3d4e5f6071 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "model.num_tokens=512 model.max_tokens=1024 tokenizer=bert pad_token=0 eos_token='</s>' model.token=101",
    "data.token=${oc.env:TOKEN} data.password=null data.token=true data.secret=???",
    "lr: 0.1\ntoken: null  # of the server\n",
    '{\n  "token": null,\n  "secret": {\n    "a": "b"\n  },\n  "password": [\n    1\n  ]\n}',
    "{'token': None, 'password': ''} secret_size: 3, token_type_ids=[0, 1] passwordless=yes",
    "https://user@host.org/x https://host.org:8080/a@b ssh://git@host.org/x git@host.org:org/x.git tcp://[::1]:29500",
    "sk-learn-digits-classification hf_model_of_mine/hf_transformers the token is s3cret: 5 tokens",
    "PWD=/work CUDA_VISIBLE_DEVICES=0,1 keys=a,b key=monkey train/loss 0.2514 pipeline.split_size=1,3,5",
    "resume: got '/etc/passwd': there is no such directory, 'outputs/api_key': no, FILES: got 'secret': none",
    "AKIAIOSFODNN7EXAMPLEANDMORE eyJhbGciOiJIUzI1NiJ9.json",
)


@pytest.mark.parametrize("what", HIDDEN)
def test_credentials_are_hidden_in_texts(what):
    text, expected = HIDDEN[what]
    assert redacted(text) == expected
    assert redacted(expected) == expected


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts_are_unchanged(text):
    assert redacted(text) == text


def test_the_options_and_guides_of_the_project_are_unchanged():
    docs = Path(__file__).parents[2] / "docs"
    for path in (*CONF.rglob("*.yaml"), *docs.rglob("*.md")):
        assert redacted(path.read_text(encoding="utf-8")) == path.read_text(encoding="utf-8"), path


def test_credentials_are_hidden_in_configs_and_the_config_is_not_changed():
    config = {
        "lr": 0.1,
        "tokens": 5,
        "data": {"root": "https://ann:s3cret@host/x", "token": "s3cret", "pad_token": 3, "password": 12345678},
        "db": {"credentials": {"user": "ann", "ids": ["a", 5, None]}},
        "notes": ["x", {"api_key": "s3cret"}, ("y", f"hf_{TOKEN}")],
        "env": {"token": "${oc.env:TOKEN}", "secret": None, "use_token": True, "token_id": "abc"},
    }
    before = repr(config)
    assert redacted_values(config) == {
        "lr": 0.1,
        "tokens": 5,
        "data": {"root": "https://ann:***@host/x", "token": "***", "pad_token": 3, "password": "***"},
        "db": {"credentials": {"user": "***", "ids": ["***", "***", None]}},
        "notes": ["x", {"api_key": "***"}, ["y", "***"]],
        "env": {"token": "${oc.env:TOKEN}", "secret": None, "use_token": True, "token_id": "abc"},
    }
    assert repr(config) == before


def test_the_whole_value_of_an_override_is_hidden():
    overrides = ["lr=0.1,0.2", "+data.password=a b,'c'&d", "data.token=null", "~data.token", "data.root='a b'"]
    assert redacted_values(overrides) == [
        "lr=0.1,0.2", "+data.password=***", "data.token=null", "~data.token", "data.root='a b'",
    ]  # fmt: skip


PARTS = ("a", "a.", " ", "token", "token=", 'token="', "://", "://a:", " sk-", "eyJ", "eyJ-", "eyJaaaaaaaa.", "{", "\n")


@pytest.mark.parametrize("part", PARTS)
def test_a_long_text_takes_linear_time(part):
    begun = time.process_time()
    assert redacted(part * (200_000 // len(part)) + f" hf_{TOKEN}").count("k" * 20) == 0
    assert time.process_time() - begun < 5  # quadratic time would be half a minute


@pytest.mark.cases(
    ("plain", "plain"),
    ("Größe → 🙂\n", "Größe → 🙂\n"),
    (os.fsdecode(b"a\xff\xc3.png"), r"a\xff\xc3.png"),
    (os.fsdecode("ü".encode() + b"\x80"), r"ü\x80"),
    ("\ud800", r"\ud800"),  # JSON can contain it, but no file name
    ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
    ("a\x9b31m\x7f\0", r"a\x9b31m\x7f\x00"),  # \x9b alone starts an escape sequence (C1)
    ("a\rb\vc\x85\u2028d", r"a\rb\x0bc\x85\u2028d"),
    ("\u202egnp.exe", r"\u202egnp.exe"),
    (os.fsdecode(b"\xff\x1b"), r"\xff\x1b"),
    ("a\tb\nc \xa0\u3000", "a\tb\nc \xa0\u3000"),
)
def test_bytes_that_are_not_utf_8_and_control_characters_are_escaped(text, expected):
    assert printable(text) == expected
