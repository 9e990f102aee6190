"""Texts as the tokens of a tokenizer: what is trained on, what an evaluation measures, and how texts are continued."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.extras import require
from torch.nn.functional import cross_entropy

import runner
from runner.commands import predict
from runner.config.errors import ConfigError
from runner.data import text as module
from runner.data.text import Text
from runner.data.vocabulary import Tokenizer
from runner.models.gpt import GPT

CONTEXT, CPU = 8, torch.device("cpu")
TEXTS = ["".join(f"{a} plus {b} is {a + b}\n" for b in range(3 + a % 3)) + "zw\u00f6lf\n" for a in range(20)]
SIZES = {"layers": 1, "width": 16, "heads": 2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, content in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(content, encoding="utf-8")
    return folder


def tokenizer_file(path: Path, special: str = "<|endoftext|>") -> Path:
    """Save a tokenizer of byte pairs, which splits text as that of GPT-2 does."""
    package = require("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    every_byte = package.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 320, "special_tokens": [special], "initial_alphabet": every_byte, "show_progress": False}
    made.train_from_iterator([*TEXTS, "\n\n\n    \n        " * 9], package.trainers.BpeTrainer(**options))
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tokenizer_file(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def ids_of(samples: Any) -> list[int]:
    return samples.tokens.read(0, len(samples.tokens)).tolist()


def expected(file: Path, contents: list[str]) -> tuple[list[int], list[int]]:
    """The ids of documents, each with the end of a text, and for each id the next one, or -100 after such an end."""
    package = require("tokenizers").Tokenizer.from_file(str(file))
    end = package.token_to_id("<|endoftext|>")
    ids = [each for content in contents for each in [*package.encode(content).ids, end]]
    return ids, [-100 if id == end else following for id, following in itertools.pairwise(ids)]


def test_ids_are_those_of_the_tokenizer_with_the_end_of_a_text_between_documents(texts, file):
    samples: Any = Text(file=str(texts), tokenizer=str(file), context=CONTEXT).splits({})["all"]()
    ids, targets = expected(file, TEXTS)
    assert len(ids) < sum(len(content.encode()) for content in TEXTS) / 1.5, "several bytes are one token"
    assert ids_of(samples) == ids
    assert targets.count(-100) == len(TEXTS) - 1
    batches = [*samples.in_order(3, (0, 1), CPU)]
    count = len(targets)
    assert torch.cat([each.inputs for each in batches]).flatten()[:count].tolist() == ids[:count]
    assert torch.cat([each.targets for each in batches]).flatten()[:count].tolist() == targets


def test_a_text_with_the_end_of_a_document_in_it_is_two_documents_and_the_run_says_so(file, tmp_path, caplog):
    (tmp_path / "two.txt").write_text("<|endoftext|>".join(TEXTS[:2]), encoding="utf-8", newline="")
    samples = Text(file=str(tmp_path), tokenizer=str(file), context=CONTEXT).splits({})["all"]()
    assert ids_of(samples) == expected(file, TEXTS[:2])[0]
    assert "that ends a document in them, 1 times" in caplog.text


def test_what_a_tokenizer_has_for_other_models_changes_no_text(texts, file, tmp_path):
    package = require("tokenizers").Tokenizer.from_file(str(file))
    package.enable_truncation(5)
    package.enable_padding(length=9)
    package.save(str(tmp_path / "tokenizer.json"))
    options: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "context": CONTEXT}
    assert ids_of(Text(file=str(texts), **options).splits({})["all"]()) == expected(file, TEXTS)[0]


def test_ids_may_have_gaps_and_the_space_before_a_continuation_is_kept(tmp_path):
    package = require("tokenizers")
    made = package.Tokenizer(package.models.WordLevel({"\u2581one": 0, "\u2581two": 1, "s": 7}, unk_token="s"))
    made.pre_tokenizer, made.decoder = package.pre_tokenizers.Metaspace(), package.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Tokenizer(str(tmp_path / "tokenizer.json"))
    assert (vocabulary.encode("one"), vocabulary.size) == ([0], 8)
    assert (vocabulary.decode([1]), vocabulary.decode_after([0], [1, 7])) == ("two", " twos")


CODE = "def f(x):\n    if x:\n\n        return 'zw\u00f6lf'\n    \n\n\n1 plus 1 is 2 \n  # a comment\nf(3)\n"


@pytest.mark.parametrize("size", [100, 101, 102, 103, 150, 1000])
def test_a_text_in_pieces_has_the_ids_of_the_whole(size, file, tmp_path, monkeypatch):
    (tmp_path / "code.txt").write_text(CODE * 9, encoding="utf-8")
    monkeypatch.setattr(module, "_PIECE", size)
    samples = Text(file=str(tmp_path), tokenizer=str(file), context=CONTEXT).splits({})["all"]()
    assert ids_of(samples) == expected(file, [CODE * 9])[0]


@pytest.mark.parametrize("content", [b"x\n" * 99 + b"\xff\n", b"x\n" * 99 + "\u00f6".encode()[:1]])
def test_a_text_that_is_not_utf_8_is_refused(content, file, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 64)
    (tmp_path / "latin.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"not UTF-8.* 198") as refused:
        Text(file=str(tmp_path), tokenizer=str(file), context=CONTEXT).splits({})["all"]()
    assert refused.value.key == "file"


def options(texts: Path, file: Path, *more: str) -> list[str]:
    small = [f"model.{key}={value}" for key, value in SIZES.items()]
    return [
        *("workload=language", f"data.file={texts}", f"data.tokenizer={file}", f"data.context={CONTEXT}", *small),
        *("data.holdout=0.2", "device=cpu", "device.threads=1", "precision=64", "batch_size=8", "steps=4"),
        *("eval_every=0", "workload.sample_tokens=5", *more),
    ]


@pytest.fixture(scope="module")
def trained(texts, file, tmp_path_factory) -> Any:
    return runner.train(options(texts, file, f"output_root={tmp_path_factory.mktemp('outputs')}"))


def network(trained: Any) -> torch.nn.Module:
    weights = runner.load(trained.directory).weights("last")
    model = GPT(len(weights["wte.weight"]), CONTEXT, **SIZES).double()
    model.load_state_dict(weights)
    return model


def test_an_evaluation_counts_the_bits_for_each_byte_of_the_text(trained, texts, file):
    held_out: Any = Text(file=str(texts), tokenizer=str(file), context=CONTEXT, holdout=0.2).load()[1]
    ids = ids_of(held_out)
    package = require("tokenizers").Tokenizer.from_file(str(file))
    contents = package.decode(ids, skip_special_tokens=False).split("<|endoftext|>")[:-1]
    assert set(contents) < set(TEXTS)
    ids, targets = expected(file, contents)
    filled = [*ids[:-1], *[0] * (-len(targets) % CONTEXT)]
    with torch.no_grad():
        logits = network(trained)(torch.tensor(filled).view(-1, CONTEXT)).flatten(0, 1)[: len(targets)]
    loss = cross_entropy(logits, torch.tensor(targets)).item()
    bits = loss / math.log(2) * len(ids) / sum(len(content.encode()) for content in contents)
    assert trained.metrics["eval/loss"] == pytest.approx(loss, rel=1e-12)
    assert trained.metrics["eval/bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_the_command_prints_the_text_of_the_tokens_that_continue_a_prompt(trained, file, capsys):
    package = require("tokenizers").Tokenizer.from_file(str(file))
    model, prompt = network(trained), "1 plus "
    ids = package.encode(prompt).ids
    start = len(ids)
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax()))
    assert package.token_to_id("<|endoftext|>") not in ids
    assert predict.main([str(trained.directory), "--prompt", prompt, "--tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == prompt + package.decode(ids[start:]) + "\n"


def test_another_tokenizer_than_that_of_a_run_is_refused(texts, file, tmp_path):
    own = tmp_path / "tokenizer.json"
    own.write_bytes(file.read_bytes())
    run = runner.train(options(texts, own, f"output_root={tmp_path}", "workload.sample_tokens=0"))
    own.write_text(own.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    saved, again = runner.load(run.directory), [f"resume={run.directory}", "steps=6", "data.changed=accept"]
    uses = (lambda: saved.generate("1", "last"), lambda: saved.evaluate("last"), lambda: runner.train(again))
    for use in uses:
        with pytest.raises(ConfigError) as refused:
            use()
        assert refused.value.key == "data.tokenizer"


def test_without_a_token_for_the_end_of_a_text_documents_follow_one_another(texts, tmp_path):
    file = tokenizer_file(tmp_path / "tokenizer.json", special="<unknown>")
    package = require("tokenizers").Tokenizer.from_file(str(file))
    samples: Any = Text(file=str(texts), tokenizer=str(file), context=CONTEXT).splits({})["all"]()
    assert ids_of(samples) == [each for content in TEXTS for each in package.encode(content).ids]
    targets = torch.cat([batch.targets for batch in samples.in_order(3, (0, 1), CPU)]).flatten()
    assert targets[: len(samples.tokens) - 1].tolist() == ids_of(samples)[1:], "each one but the first is a target"
