"""Tests of text and of token ids in files: contexts, ends of documents, what is held out, and shards."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.data.base import DataError
from runner.data.text import Text, Tokens
from runner.data.token_files import Segment, TokenFiles

CPU, END = torch.device("cpu"), 256


def write(folder: Path, contents: dict[str, bytes]) -> str:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def ids_of(samples: Any) -> list[int]:
    return samples.tokens.read(0, len(samples.tokens)).tolist()


def in_order(samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [*samples.in_order(2, (0, 1), CPU)]
    return torch.cat([each.inputs for each in batches]), torch.cat([each.targets for each in batches])


def test_each_byte_has_the_next_one_as_its_target_but_for_the_first_of_a_document(tmp_path):
    texts = {"a.txt": b"first\r\n", "b/c.txt": "zw\u00f6lf".encode() + b"\xff", "d.txt": b""}
    samples = Text(file=write(tmp_path, texts), context=4).splits({})["all"]()
    ids = [*texts["a.txt"], END, *texts["b/c.txt"], END]
    assert len(ids) == 16
    inputs, targets = in_order(samples)
    assert inputs.tolist() == [ids[0:4], ids[4:8], ids[8:12], [*ids[12:15], 0]], "the last one is filled up"
    wanted = [*ids[1:16], -100]
    wanted[7] = -100
    assert targets.flatten().tolist() == wanted


def test_training_batches_are_the_contexts_of_a_permutation(tmp_path):
    content = bytes(range(1, 201))
    samples = Text(file=write(tmp_path, {"a": content}), context=5).splits({})["all"]()
    assert len(samples) == 40
    plan = Plan(batch_size=20, accumulation=2)
    batches = samples.batches(plan.stream(0), 3, CPU)
    epoch = torch.cat([next(batches).inputs for _ in range(4)])
    assert sorted(epoch.tolist()) == [[*content[i : i + 5]] for i in range(0, 200, 5)], "each context once"
    assert not torch.equal(epoch, torch.tensor(sorted(epoch.tolist())))


def test_what_is_read_is_the_concatenation_of_the_segments(tmp_path):
    parts = [np.arange(7, dtype="<u2"), np.arange(100, 103, dtype="<u2"), np.arange(50, 61, dtype="<u2")]
    for number, part in enumerate(parts):
        (tmp_path / str(number)).write_bytes(b"header" + part.tobytes())
    segments = [Segment(str(tmp_path / str(number)), 6, len(part), "<u2") for number, part in enumerate(parts)]
    for end in (None, 9999):
        tokens = TokenFiles(segments, end, is_inserted=True)
        whole = np.concatenate([np.append(part, [] if end is None else [end]) for part in parts]).astype(np.int64)
        assert len(tokens) == len(whole)
        for start in range(len(whole)):
            for stop in range(start, len(whole) + 1):
                assert tokens.read(start, stop).tolist() == whole[start:stop].tolist()


def test_whole_documents_are_held_out_and_the_same_ones_in_every_run(tmp_path):
    texts = {f"{number:02}.py": bytes([65 + number]) * (50 + 7 * number) for number in range(20)}
    train, held_out = Text(file=write(tmp_path, texts), context=8, holdout=0.2).load()
    both = [{chr(each) for each in ids_of(part) if each != END} for part in (train, held_out)]
    assert not both[0] & both[1]
    assert both[0] | both[1] == {chr(65 + number) for number in range(20)}
    total = sum(map(len, texts.values()))
    assert 0.15 * total < held_out.num_bytes <= 0.2 * total  # pyright: ignore[reportAttributeAccessIssue]
    again = Text(file=str(tmp_path), context=16, holdout=0.2).load()
    assert [ids_of(each) for each in again] == [ids_of(train), ids_of(held_out)]


def test_a_tiny_document_is_not_all_that_is_held_out_and_a_large_one_not_as_a_whole(tmp_path):
    texts = {"a": b"x" * 50, "b": b"y", "c": b"z" * 40}
    train, held_out = Text(file=write(tmp_path, texts), context=8, holdout=0.1).load()
    assert ids_of(train) == [*texts["a"], END, *b"z" * 32, END]
    assert ids_of(held_out) == [*texts["b"], END, *b"z" * 8, END]


@pytest.mark.parametrize(("content", "position"), [(bytes(range(1, 101)), 90), ("a\N{SNOWMAN}".encode() * 25, 89)])
def test_of_a_single_document_the_end_is_held_out_and_no_letter_is_cut(content, position, tmp_path):
    train, held_out = Text(file=write(tmp_path, {"a": content}) + "/a", context=4, holdout=0.1).load()
    assert ids_of(train) == [*content[:position], END]
    assert ids_of(held_out) == [*content[position:], END]


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    texts = {"a": b"x" * 100, "b": b"y" * 100}
    before = Text(file=write(tmp_path, texts), context=4).load()
    assert before[0].fingerprint() == before[1].fingerprint()
    (tmp_path / "b").write_bytes(b"y" * 99 + b"z")
    assert Text(file=str(tmp_path), context=4).load()[0].fingerprint() != before[0].fingerprint()


def test_hidden_and_binary_files_are_left_out_and_a_pattern_chooses_others(tmp_path, caplog):
    texts = {"a.md": b"markdown " * 9, ".hidden": b"secret " * 9, "b.py": b"python " * 9, "c.bin": b"\0" * 80}
    samples = Text(file=write(tmp_path, texts), context=4).splits({})["all"]()
    assert bytes(each for each in ids_of(samples) if each != END) == texts["a.md"] + texts["b.py"]
    assert "1 of 3 files are no text" in caplog.text
    chosen = Text(file=str(tmp_path), context=4, glob="*.md").splits({})["all"]()
    assert ids_of(chosen) == [*texts["a.md"], END], "also where a single document is divided"


def test_the_default_text_is_the_source_of_the_standard_library():
    train, held_out = Text().load()
    import json.decoder

    source = Path(json.decoder.__file__).read_bytes()
    whole = b"".join(bytes(each if each != END else 0 for each in ids_of(part)) for part in (train, held_out))
    assert source in whole
    assert 0.005 < held_out.num_bytes / train.num_bytes < 0.011  # pyright: ignore[reportAttributeAccessIssue]


def shard(path: Path, ids: np.ndarray, form: str) -> None:
    if form == "npy":
        np.save(path, ids)
    else:
        header = np.zeros(256, "<i4")
        header[:3] = (20240801, 7, len(ids)) if form == "llama3" else (20240520, 1, len(ids))
        path.write_bytes(header.tobytes() * (form != "raw") + ids.tobytes())


@pytest.mark.parametrize("form", ["npy", "raw", "llm.c", "llama3"])
def test_shards_are_read_as_they_were_written(form, tmp_path):
    ids = np.random.default_rng(0).integers(0, 50_000, 1000).astype("<u4" if form == "llama3" else "<u2")
    suffix = "npy" if form == "npy" else "bin"
    for number, part in enumerate((ids[:400], ids[400:])):
        shard(tmp_path / f"train_{number}.{suffix}", part, form)
    shard(tmp_path / f"val_0.{suffix}", ids[:33], form)
    train, held_out = Tokens(file=str(tmp_path), context=16).load()
    assert ids_of(train) == ids.tolist()
    assert ids_of(held_out) == ids[:33].tolist()
    inputs, targets = in_order(train)
    assert inputs.flatten()[:999].tolist() == ids[:999].tolist()
    assert targets.flatten()[:999].tolist() == ids[1:].tolist(), "without a known end, every token is a target"
    assert (targets.flatten()[999:] == -100).all()


@pytest.mark.parametrize("prefix", ["", "val_"])
def test_without_files_that_say_so_the_end_of_the_shards_is_held_out(prefix, tmp_path):
    for name, ids in (("a.npy", np.arange(300)), ("b.npy", np.arange(300, 600))):
        np.save(tmp_path / f"{prefix}{name}", ids.astype(np.int32))
    train, held_out = Tokens(file=str(tmp_path), context=16, holdout=0.6).load()
    assert ids_of(train) == [*range(240)]
    assert ids_of(held_out) == [*range(240, 600)]


def test_memory_does_not_grow_with_a_file_of_five_gigabytes(tmp_path):
    file = tmp_path / "train.bin"
    with file.open("wb") as sparse:
        sparse.truncate(5 * 10**9)
    samples, _ = Tokens(file=str(file), context=1024).load()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = samples.batches(Plan(batch_size=64).stream(0), 0, CPU)
    assert all(not next(batches).inputs.any() for _ in range(50))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 100


BAD_TEXT = {
    "none": ({}, {}, "file", "no text"),
    "empty": ({"a": b""}, {}, "file", "no text"),
    "binary": ({"a": b"x\0" * 100}, {}, "file", "null byte"),
    "shorter than a context": ({"a": b"x" * 20}, {"context": 64}, "context", "20 tokens"),
    "a pattern that matches nothing": ({"a": b"x" * 20}, {"glob": "*.md"}, "glob", "no file"),
}


@pytest.mark.parametrize(("texts", "options", "key", "why"), BAD_TEXT.values(), ids=BAD_TEXT)
def test_a_text_that_cannot_be_used_is_refused(texts, options, key, why, tmp_path):
    with pytest.raises(ConfigError, match=why) as refused:
        Text(file=write(tmp_path, texts), **options).load()
    assert refused.value.key == key


BAD_SHARDS = {
    "no file is named": ({}, {"file": None}, "file"),
    "none": ({}, {}, "file"),
    "of two dtypes": ({"a.npy": np.zeros(99, "u2"), "b.npy": np.zeros(99, "i4")}, {}, "file"),
    "of real numbers": ({"a.npy": np.zeros(99)}, {}, "file"),
    "in a table": ({"a.npy": np.zeros((9, 9), "u2")}, {}, "file"),
    "beyond the vocabulary": ({"a.npy": np.full(99, 300)}, {"vocabulary_size": 300}, "file"),
    "negative": ({"a.npy": np.full(99, -1)}, {}, "file"),
    "half an id": ({"a.bin": b"123"}, {}, "file"),
    "no array": ({"a.npy": b"123" * 30}, {}, "file"),
    "empty": ({"a.bin": b"", "b.npy": np.zeros(0, "u2")}, {}, "file"),
    "of more bits": ({"a.bin": np.arange(99, dtype="<u4").tobytes()}, {}, "file"),
}


@pytest.mark.parametrize(("files", "options", "key"), BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_shards_that_cannot_be_used_are_refused(files, options, key, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content) if isinstance(content, bytes) else np.save(tmp_path / name, content)
    with pytest.raises(ConfigError) as refused:
        Tokens(**{"file": str(tmp_path), "context": 8} | options).load()
    assert refused.value.key == key


def test_an_id_in_the_middle_that_is_none_of_the_vocabulary_is_named_when_it_is_read(tmp_path):
    ids = np.zeros(400_000, "u2")
    ids[200_000] = 1000
    np.save(tmp_path / "a.npy", ids)
    samples, _ = Tokens(file=str(tmp_path), vocabulary_size=1000, context=64).load()
    with pytest.raises(DataError, match=r"a\.npy, token 200,000: there is the token id 1000"):
        in_order(samples)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    write(tmp_path, {"a": b"x" * 1000})
    samples, _ = Text(file=str(tmp_path / "a"), context=8, holdout=0.1).load()
    (tmp_path / "a").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="shorter"):
        in_order(samples)
