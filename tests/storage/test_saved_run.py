"""Tests of `runner.storage.saved_run`: configs and overrides are read as they were written, or refused if damaged."""

import hashlib
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.checkpoint_edits import sealed_config as sealed
from helpers.compose import compose_config
from helpers.permissions import enforced_permissions

from runner.config.errors import ConfigError
from runner.storage import saved_run
from runner.storage.saved_run import UnreadableConfigError, config_text, parse_config

TEXTS = ["1e-3", "016", "on", "12:30", "a: b", "- a", "", " a ", "ü", "x\ty", "a\nb", "#a", '"', "\\"]
TEXTS += ["\x85\u2028", "a\udcffb", "\x1b[31m", "\ufeffa", "\x00", "5" * 5_000, ":".join(["59"] * 1_000)]
NUMBERS = [0, -3, 2**63, 10**300, 1e-3, 1e300, float("inf"), True, None]
VALUES: list[Any] = [*TEXTS, *NUMBERS, [], [1, [2.5]], {"a": {}}, [0] * 5000]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_value_is_read_as_it_was_written_with_its_type(value):
    config = {"key": value, "node": {"list": [value, 1, None]}}
    saved = saved_run.parse_config(saved_run.config_text(config).encode())
    assert (saved, type(saved["key"])) == (config, type(value))


def test_a_changed_or_truncated_file_is_refused():
    text = saved_run.config_text({"optimizer": {"lr": 0.2}, "steps": 60})
    changed = [text.replace(*change) for change in (("0.2", "0.3"), ("steps: 60\n", ""), ("60", "61"))]
    for other in (*changed, *(text[:length] for length in range(len(text) - 1))):
        assert other != text
        with pytest.raises(saved_run.UnreadableConfigError, match="SHA-256"):
            saved_run.parse_config(other.encode())


@pytest.mark.cases(
    b"[]",
    b"a: 1\na: 2",
    b"\xff\xfe",
    b"a: !!python/object/apply:os.system [true]",
    b"a: &x [*x]",
    b"a: !!binary aGk=",
    b"[" * 100_000,
    b"a: " + b"{b: " * 5_000,
    b"a: " + b"9" * 5_000,
    ids=lambda content: content[:20].decode(errors="replace"),
)
def test_anything_but_plain_values_is_refused(content):
    with pytest.raises(saved_run.UnreadableConfigError):
        saved_run.parse_config(content if content == b"\xff\xfe" else sealed(content))


@pytest.mark.cases(
    b"a: " + b"{b: 1, " * 140_000,
    b"a: &x [1]\nb: [" + b"*x, " * 200_000 + b"]",
    ids=["deep", "repeated"],
)
def test_a_file_of_a_megabyte_is_refused_in_seconds(content):
    begun = time.process_time()
    with pytest.raises(saved_run.UnreadableConfigError):
        saved_run.parse_config(sealed(content))
    assert time.process_time() - begun < 5  # the first took a minute


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with checkpoints at steps 10 and 20; the run and each checkpoint have different learning rates."""
    path = tmp_path / "run"
    for step in (10, 20):
        checkpoint = path / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.yaml").write_text(saved_run.config_text({"lr": step}))
    (path / "config.yaml").write_text(saved_run.config_text({"lr": 30}))
    return path


def test_a_run_directory_and_each_checkpoint_have_their_own_config(run):
    assert saved_run.saved_config(run) == ({"lr": 30}, run / "config.yaml", [])
    for step, checkpoint in zip((10, 20), saved_run.checkpoints(run), strict=True):
        assert saved_run.saved_config(checkpoint) == ({"lr": step}, checkpoint / "config.yaml", [])
        assert saved_run.directory_of(checkpoint) == saved_run.directory_of(run) == run
        (checkpoint / "config.yaml").unlink()
        assert saved_run.saved_config(checkpoint).values == {"lr": 30}


def test_a_damaged_config_is_replaced_by_the_newest_copy(run):
    (run / "config.yaml").write_bytes(sealed(b"a: !<tag:%1b]0;title%07> b"))
    values, file, [reason] = saved_run.saved_config(run)
    assert (values, file) == ({"lr": 20}, saved_run.checkpoints(run)[1] / "config.yaml")
    assert reason.startswith("config.yaml: ")
    assert reason.isprintable()
    file.write_bytes(b"\xff")
    assert saved_run.saved_config(run).values == {"lr": 10}
    (saved_run.checkpoints(run)[0] / "config.yaml").unlink()
    with pytest.raises(saved_run.UnreadableConfigError):
        saved_run.saved_config(run)


def test_checkpoints_are_in_the_order_of_their_steps_and_not_of_their_names(run):
    steps = (99_999_999, 100_000_000)
    for step in steps:
        path = run / "checkpoints" / f"step_{step}"
        path.mkdir()
        (path / "config.yaml").write_text(saved_run.config_text({"lr": step}))
    assert [path.name for path in saved_run.checkpoints(run)[-2:]] == [f"step_{step}" for step in steps]
    (run / "config.yaml").write_text("")
    assert saved_run.saved_config(run).values == {"lr": 100_000_000}


def test_only_regular_files_are_read(run):
    (run / "config.yaml").rename(run.parent / "elsewhere")
    (run / "config.yaml").symlink_to(run.parent / "elsewhere")
    assert saved_run.saved_config(run).values == {"lr": 20}
    (run / "config.yaml").unlink()
    (run / "config.yaml").write_bytes(sealed(b"a: " + b"b" * 1_000_000))
    assert saved_run.saved_config(run).values == {"lr": 20}, "nor those that are too large"


def test_a_linked_folder_of_checkpoints_is_not_followed(run):
    (run / "checkpoints").rename(run.parent / "elsewhere")
    (run / "checkpoints").symlink_to(run.parent / "elsewhere")
    (run / "config.yaml").unlink()
    with pytest.raises(saved_run.UnreadableConfigError):
        saved_run.saved_config(run)


@pytest.mark.parametrize("secret", ["", "checkpoints"])
def test_checkpoints_that_cannot_be_read_are_not_treated_as_missing(secret, run):
    with enforced_permissions(run / secret, 0):
        with pytest.raises(ConfigError) as refused:
            saved_run.checkpoints(run)
        assert (refused.value.key, refused.value.got) == ("resume", str(run / "checkpoints"))
        assert "Permission denied" in refused.value.why
        if secret:
            assert saved_run.saved_config(run) == ({"lr": 30}, run / "config.yaml", []), "they are not needed"
    if secret:
        (run / "config.yaml").write_text("")
    with (
        enforced_permissions(run / secret, 0),
        pytest.raises(saved_run.UnreadableConfigError, match=r"checkpoints: .*Permission denied"),
    ):
        saved_run.saved_config(run)
    assert saved_run.saved_config(run).values == {"lr": 20 if secret else 30}


@pytest.mark.cases(
    (b"- seed=1\n- ~model", ["seed=1", "~model"]),
    (b"- a=${oc.env:HOME}", ["a=${oc.env:HOME}"]),
    (b"", []),
    (b"a: 1", []),
    (b"\xff", []),
    (b"[" * 5_000, []),
    (b"- !!python/object/apply:os.system [true]", []),
    (b"- &a [x, x]\n- &b [*a, *a]\n", []),
)
def test_overrides_are_shown_as_they_were_typed(content, wanted, tmp_path):
    assert saved_run.saved_overrides(tmp_path) == [], "there is no file"
    (tmp_path / "overrides.yaml").write_bytes(content)
    assert saved_run.saved_overrides(tmp_path) == wanted


@pytest.mark.cases(
    ("a: 1\nb:\n  c: [1, 2]\nd:\n- 1\n- x: 2\n", {"a": 1, "b": {"c": [1, 2]}, "d": [1, {"x": 2}]}),
    ("a: 'x\n\n  b: 2'\nc: 3\n", {"a": "x\nb: 2", "c": 3}),
    ("a: |\n  x\n  y\nb: null\n", {"a": "x\ny\n", "b": None}),
    ('{"a": 1,\n"b": {"c": 2}}\n', {"a": 1, "b": {"c": 2}}),
    ("# comment\na: 1\n", {"a": 1}),
    ("a: 1\na: 2\n", None),
    ("a: 1\n- 2\n", None),
    ("a: &x 1\nb: *x\n", None),
    ("- 1\n", None),
)
def test_the_parts_of_a_config_are_read_as_the_whole(text, values):
    content = f"{text}# sha256 of the lines above: {hashlib.sha256(text.encode()).hexdigest()}\n".encode()
    if values is None:
        with pytest.raises(UnreadableConfigError):
            parse_config(content)
    else:
        assert parse_config(content) == parse_config(content, is_read_only=True) == values


def test_what_configs_have_in_common_is_parsed_once_and_copied(tmp_path):
    config = compose_config()
    texts = [config_text(config | {"seed": seed}).encode() for seed in range(20)]
    parse_config(texts[0])
    with mock.patch.object(saved_run, "plain_values", wraps=saved_run.plain_values) as parse:
        found = [parse_config(text) for text in texts]
        assert sum(len(call.args[0]) for call in parse.call_args_list) < 20 * len("seed: 19\n")
    assert found == [config | {"seed": seed} for seed in range(20)]
    found[0]["optimizer"]["lr"] = "changed"
    assert parse_config(texts[0]) == config | {"seed": 0}
