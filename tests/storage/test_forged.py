"""Tests with forged checkpoints, whose hashes are correct but whose content is not: they are refused with an error."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.checkpoint_edits import (
    REMOVE_KEY,
    Keys,
    nested_values,
    read_checkpoint_file,
    rewrite_manifest,
    with_value_changed,
    write_checkpoint_file,
)
from helpers.compose import TINY_CPU, build_composed_run, prepare_session, train_in

from runner.config.errors import ConfigError
from runner.training import prepare, train_step

AGENT = ("device=cpu", "device.threads=1", "workload=dqn", "env.num_envs=2", "workload.replay_size=64")
AGENT += ("workload.warm_up=40", "workload.env_steps=80", "workload.eval_episodes=1", "batch_size=8")
AGENT += ("workload.epsilon_repeat=4",)

RUNS = {
    "sgd": (*TINY_CPU, "optimizer=sgd"),
    "adam": (*TINY_CPU, "optimizer=adam"),
    "adamw": (*TINY_CPU, "optimizer=adamw", "precision=16"),
    "agent": AGENT,
}


STEPS = ("steps=3", "save_every=2", "eval_every=2", "log_every=5")


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def billion_laughs() -> list:
    """Return nested lists that stand for 2^60 strings, as in the "billion laughs" attack."""
    value = ["ha"]
    for _ in range(60):
        value = [value, value]
    return value


VALUES: dict[str, Callable[[Any], Any]] = {
    "a text": lambda _: "1",
    "null": lambda _: None,
    "NaN": lambda _: float("nan"),
    "negative": lambda _: -5,
    "a huge integer": lambda _: 10**400,
    "a boolean": lambda _: True,
    "a list": lambda _: [1],
    "a dict": lambda _: {"a": 1},
    "deep": lambda _: nested(150),
    "a tensor": lambda _: torch.zeros(7),
}

TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "short": lambda t: t.flatten()[:-1].clone() if t.dim() else torch.zeros(0, dtype=t.dtype),
    "one value": lambda t: t.flatten()[:1].clone() if t.numel() != 1 or t.dim() != 1 else t.reshape(()).clone(),
    "long": lambda t: torch.cat((t.flatten(), t.flatten()[:1])),
    "other shape": lambda t: t[None].clone(),
    "half": lambda t: t.half() if t.is_floating_point() else t.float(),
    "integers": lambda t: t.to(torch.int16),
    "complex": lambda t: t.to(torch.complex64),
    "not finite": lambda t: torch.full_like(t, float("inf")) if t.is_floating_point() else t[None].clone(),
    "shared elements": lambda t: torch.zeros(1, dtype=t.dtype).expand(t.shape if t.numel() > 1 else 2),
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 and 1 not in t.shape else t[None].clone(),
    "sparse": lambda t: t.to_sparse() if t.dim() else t[None].to_sparse(),
    "with gradient": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t[None].clone(),
    "meta": lambda t: torch.empty_like(t, device="meta"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains the run `RUNS[name]`, once per name, and returns its run directory."""
    known: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in known:
            path = tmp_path_factory.mktemp(name)
            train_in(path, build_composed_run(*RUNS[name], *STEPS))
            known[name] = path
        return known[name]

    return directory


class Forger:
    """Resumes runs from checkpoints with changed content."""

    def __init__(self, name: str, original: Path, directory: Path):
        self.directory, self.original = directory, original / "checkpoints/step_00000002"
        self.path = directory / "checkpoints" / self.original.name
        self.run = build_composed_run(*RUNS[name], *STEPS)
        self.session = prepare_session(self.run)

    def restore(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(self.original, self.path)

    def outcome(self) -> str:
        """Resume and train one step; return `resumed`, `refused`, or the message of an unexpected `ConfigError`."""
        session = self.session
        try:
            state = prepare(self.run, session, self.directory)
            batches = session.workload.batches(state.model, session.plan, state.step, session.device)
            train_step(state, batches, next(session.plan.steps(state.step, session.num_steps)), log_due=True)
            return "resumed"
        except ConfigError as refusal:
            return "refused" if refusal.key == "resume" and len(str(refusal)) < 1000 else str(refusal)

    def with_content(self, file: str, content: Any) -> str:
        self.restore()
        write_checkpoint_file(self.path / file, content)
        return self.outcome()


@pytest.fixture
def forger(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Forger]:
    return lambda name: Forger(name, saved(name), tmp_path / "run")


def chosen(content: Any) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, value) for the values in `content`, the content of a checkpoint file, that a test changes.

    For the optimizer state, only the values of the first parameter are yielded. For vectorized environments, only the
    values of a few attributes are yielded.
    """
    kept = {next(iter(content.get("optimizer", [""])))}
    for keys, value in nested_values(content):
        if keys[0] == "optimizer" and len(keys) > 1 and keys[1] not in kept:
            continue
        attribute = keys[4:5] if keys[:4] == ("workload", "environments", "envs", "vector") else ()
        if not attribute or attribute[0] in ("state", "steps", "gravity", "num_envs", "_np_random"):
            yield keys, value


def is_free(keys: Keys) -> bool:
    """Whether a checkpoint with another value at `keys` may be accepted; true for the environments' state and seed."""
    return keys[:3] == ("workload", "environments", "envs") or keys[:3] == ("workload", "environments", "seed")


@pytest.mark.parametrize("name", RUNS)
def test_an_unchanged_copy_is_resumed(forger: Callable[[str], Forger], name: str) -> None:
    run = forger(name)
    run.restore()
    rewrite_manifest(run.path)
    assert run.outcome() == "resumed"


def is_valid(keys: Keys, value: Any, forged: Any) -> bool:
    """Whether a checkpoint may have `forged` in place of `value`."""
    if forged is REMOVE_KEY:  # the metrics of a run without evaluation, a parameter that never had a gradient
        was_added_later = keys in (("workload", "rewards"), ("num_steps",))  # earlier versions did not save them
        return isinstance(keys[-1], int) or (keys[0] in ("metrics", "optimizer") and len(keys) == 2) or was_added_later
    if forged is None and keys == ("workload", "environments"):  # of environments whose state cannot be saved
        return True
    return type(forged) is type(value) or (type(forged) is int and isinstance(value, float))


@pytest.mark.parametrize("file", ["state.pt", "rank_0.pt"])
@pytest.mark.parametrize("name", RUNS)
def test_a_value_of_another_form_is_refused(forger: Callable[[str], Forger], name: str, file: str) -> None:
    """Each value is replaced by three forged values, one after another, and then removed.

    The forged values come from the functions in `TENSORS` if the value is a tensor, and from the functions in `VALUES`
    otherwise. The functions are used in turn, so that each function is tried in several places. For a value that is
    not a tensor, changes that a checkpoint may have (see `is_valid`) are skipped.
    """
    run = forger(name)
    content, forms = (
        read_checkpoint_file(run.original / file),
        {True: cycle(TENSORS.values()), False: cycle(VALUES.values())},
    )
    for keys, value in chosen(content):
        is_tensor = isinstance(value, torch.Tensor)
        forgeries = [form(value) for form in islice(forms[is_tensor], 3)] + [REMOVE_KEY]
        for forged in forgeries:
            if not is_tensor and is_valid(keys, value, forged):
                continue
            outcome = run.with_content(file, with_value_changed(content, keys, lambda _, forged=forged: forged))
            assert outcome == "refused" or is_free(keys), (keys, type(forged), outcome)


@pytest.mark.parametrize("kind", [*TENSORS, "absent"])
def test_weights_of_another_form_are_refused(forger: Callable[[str], Forger], kind: str) -> None:
    if kind in ("sparse", "meta", "shared elements", "transposed", "with gradient"):
        return  # safetensors cannot store these
    if kind == "complex":
        try:
            safetensors.torch.save({"t": torch.zeros(1, dtype=torch.complex64)})
        except KeyError:
            pytest.skip("this safetensors writes no complex numbers")
    run = forger("sgd")
    content = read_checkpoint_file(run.original / "model.safetensors")
    for key, value in content.items():
        forged = (
            {**content, key: TENSORS[kind](value)}
            if kind != "absent"
            else {k: t for k, t in content.items() if k != key}
        )
        assert run.with_content("model.safetensors", forged) == "refused", key
    assert run.with_content("model.safetensors", {**content, "more": torch.zeros(1)}) == "refused"


@pytest.mark.parametrize("file", ["model.safetensors", "state.pt", "rank_0.pt"])
@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\5\6" + bytes(18), b"[]", b"\x80\x02]."], ids=range(5))
def test_a_file_of_another_format_is_refused(forger: Callable[[str], Forger], file: str, content: bytes) -> None:
    run = forger("sgd")
    run.restore()
    (run.path / file).write_bytes(content)
    rewrite_manifest(run.path)
    assert run.outcome() == "refused"


@pytest.mark.parametrize(
    "content", [None, 3, "text", [], (), {}, {"optimizer": {}}, nested(150), billion_laughs()], ids=range(9)
)
def test_a_file_with_unrelated_content_is_refused(forger: Callable[[str], Forger], content: Any) -> None:
    run = forger("sgd")
    assert run.with_content("state.pt", content) == "refused"
    assert run.with_content("rank_0.pt", content) == "refused" or content == {}  # {} means that there is no state


@pytest.mark.parametrize("depth", [150, 10_000, 1_000_000])
def test_deep_content_is_refused(forger: Callable[[str], Forger], depth: int) -> None:
    """The pickle is written by hand, because `torch.save` cannot write lists that are nested so deeply."""
    run = forger("sgd")
    run.restore()
    file, nest = run.path / "state.pt", b"\x80\x02}X\t\0\0\0optimizer" + b"]" * depth + b"a" * (depth - 1) + b"s."
    with zipfile.ZipFile(run.original / "state.pt") as plain, zipfile.ZipFile(file, "w") as out:
        for entry in plain.infolist():
            out.writestr(entry.filename, nest if entry.filename.endswith("data.pkl") else plain.read(entry))
    rewrite_manifest(run.path)
    assert run.outcome() == "refused"


MANIFESTS: dict[str, dict[str, Any]] = {
    "files is a list": {"files": ["state.pt"]},
    "files is absent": {"files": REMOVE_KEY},
    "files is empty": {"files": {}},
    "a path upwards": {"files": {"../../../secret": "0" * 64}},
    "an absolute path": {"files": {"/dev/zero": "0" * 64}},
    "a directory": {"files": {"..": "0" * 64}},
    "a long name": {"files": {"a" * 5000: "0" * 64}},
    "a NUL": {"files": {"a\0b": "0" * 64}},
    "half a surrogate": {"files": {"\udcff": "0" * 64}},
    "a hash that is no text": {"files": {"state.pt": 1}},
    "step is text": {"step": "2"},
    "step is a boolean": {"step": True},
    "step is negative": {"step": -2},
    "step is NaN": {"step": float("nan")},
    "step is another": {"step": 3},
    "step is absent": {"step": REMOVE_KEY},
    "world_size is text": {"world_size": "1"},
    "world_size is zero": {"world_size": 0},
    "schema is long": {"schema": "x" * 100_000},
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_with_invalid_values_and_correct_hashes_is_refused(
    forger: Callable[[str], Forger], kind: str
) -> None:
    run = forger("sgd")
    run.restore()
    rewrite_manifest(run.path, **MANIFESTS[kind])
    assert run.outcome() == "refused"


def test_a_huge_manifest_is_refused(forger: Callable[[str], Forger]) -> None:
    run = forger("sgd")
    run.restore()
    os.truncate(run.path / "manifest.json", 10**12)  # a sparse file, which takes no space on the disk
    assert run.outcome() == "refused"


FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to the right content": lambda path: path.symlink_to("../../elsewhere"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("file", ["model.safetensors", "state.pt", "rank_0.pt", "config.yaml", "manifest.json"])
def test_a_link_or_pipe_in_place_of_a_file_is_refused(forger: Callable[[str], Forger], kind: str, file: str) -> None:
    run = forger("sgd")
    run.restore()
    shutil.move(run.path / file, run.directory / "elsewhere")
    FILES[kind](run.path / file)
    assert run.outcome() == "refused"


@pytest.mark.parametrize("kind", ["checkpoints", "step"])
def test_a_link_in_place_of_a_directory_is_refused(forger: Callable[[str], Forger], kind: str) -> None:
    run = forger("sgd")
    run.restore()
    path, target = (run.path.parent if kind == "checkpoints" else run.path), run.directory / "elsewhere"
    shutil.move(path, target)
    path.symlink_to(target)
    before = sorted(target.rglob("*"))
    assert run.outcome() == "refused"
    assert sorted(target.rglob("*")) == before
