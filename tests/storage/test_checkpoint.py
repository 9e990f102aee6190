"""Tests of checkpoints: crashes, damaged and malicious files, retention, file formats, and full disks."""

import errno
import hashlib
import json
import logging
import os
import random
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from helpers.checkpoint_edits import rewrite_manifest
from helpers.command import ROOT
from helpers.compose import TINY_CPU, build_composed_run
from helpers.handmade_runs import save_and_wait
from helpers.permissions import enforced_permissions
from helpers.runs import assert_bitwise_equal

from runner.config.errors import ConfigError
from runner.storage.checkpoint import Checkpoint, chosen_checkpoint, load
from runner.storage.checkpoints import Checkpoints, prune
from runner.storage.manifest import DamagedError, saved_text
from runner.storage.run_directory import CONFIG, StorageError, saved_steps
from runner.storage.saved_run import config_text


def checkpoint(step: int) -> Checkpoint:
    """Return a small checkpoint whose tensors are filled with the step."""
    state = {"optimizer": {"w": {"momentum_buffer": torch.full((3,), float(step))}}, "best": {}, "metrics": {"a": 0.5}}
    return Checkpoint(step, {"w": torch.full((2, 2), float(step))}, state, {"random": {"cpu": torch.tensor([step])}})


def intact_step(found: Checkpoint | None) -> int:
    """Return the step of `found`, or 0 if it is None; fail unless its content is that of `checkpoint(step)`."""
    if found is None:
        return 0
    assert_bitwise_equal(vars(found), vars(checkpoint(found.step)))
    return found.step


def test_saving_a_step_again_renames_the_first_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.root / "tmp.step_00000001").mkdir(parents=True)
    assert checkpoints.latest() is None, "none is committed"
    save_and_wait(checkpoints, checkpoint(1))
    save_and_wait(checkpoints, checkpoint(1))
    assert {path.name for path in checkpoints.root.iterdir()} == {"step_00000001", "step_00000001.superseded"}
    assert intact_step(checkpoints.latest()) == 1


@pytest.fixture
def two(tmp_path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        save_and_wait(checkpoints, checkpoint(step))
    return checkpoints


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "rank_0.pt", "manifest.json"])
def test_a_flipped_bit_is_found(two, tmp_path, name):
    path = two.root / "step_00000002" / name
    data = path.read_bytes()
    choose = random.Random(name)
    for bit in choose.sample(range(len(data) * 8), 1000 if name == "manifest.json" else 100):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedError, match=name):
            load(path.parent)
    path.write_bytes(data)
    assert intact_step(two.latest()) == 2


INVALID = ("null", "[]", "{}", "{", '{"sha256": 1}', "[" * 100_000, '{"a": NaN}', "\udcff")
DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    *((name, Path.unlink) for name in ("model.safetensors", "manifest.json")),
    *((name, lambda path: (path.unlink(), path.mkdir())) for name in ("rank_0.pt", "manifest.json")),
    ("state.pt", lambda path: os.truncate(path, 0)),
    *(
        ("manifest.json", lambda path, text=text: path.write_bytes(text.encode("utf-8", "surrogateescape")))
        for text in INVALID
    ),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_checkpoint_is_set_aside(two, caplog, name, damage):
    path = two.root / "step_00000002" / name
    damage(path)
    left = {file.name for file in path.parent.iterdir()}
    with caplog.at_level(logging.WARNING, logger="runner"):
        assert intact_step(two.latest()) == 1
    assert saved_steps(two.root) == [1]
    assert {file.name for file in (two.root / "step_00000002.corrupt").iterdir()} == left, "nothing is deleted"
    assert name in caplog.text
    assert "step_00000002.corrupt" in caplog.text


def test_a_run_without_a_valid_checkpoint_is_not_resumed(two):
    for step in (1, 2):
        (two.root / f"step_{step:08d}" / "state.pt").write_bytes(b"")
    for _ in range(2):  # not at the second try either
        with pytest.raises(ConfigError) as refused:
            two.latest()
        assert (refused.value.key, refused.value.got) == ("resume", str(two.root.parent))
        assert "step_00000001, step_00000002" in refused.value.why
        assert "a new run, without resume" in refused.value.remedy
    names = {path.name for path in two.root.iterdir()}
    assert names == {"step_00000001", "step_00000002"}, "what is refused stays as it was"


@pytest.mark.cases(
    ("os.open", PermissionError(errno.EACCES, os.strerror(errno.EACCES))),
    ("safetensors.torch.load_file", MemoryError()),
    ("torch.load", MemoryError()),
)
def test_a_missing_permission_or_too_little_memory_is_not_damage(read, error, two, monkeypatch):
    monkeypatch.setattr(read, mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        two.latest()
    assert saved_steps(two.root) == [1, 2], "nothing was set aside"


def test_a_checkpoint_with_another_schema_is_refused_and_not_renamed(two):
    rewrite_manifest(two.root / "step_00000002", schema=3)
    with pytest.raises(ConfigError) as caught:
        two.latest()
    assert (caught.value.key, caught.value.got) == ("resume", str(two.root / "step_00000002"))
    assert re.findall(r"\d+", caught.value.why) == ["3", "2"], "the schema found, and the one that is read"
    assert saved_steps(two.root) == [1, 2]


def test_every_torch_load_uses_weights_only():
    sources = [path for folder in ("runner", "models") for path in (ROOT / folder).rglob("*.py")]
    loads = [line for path in sources for line in path.read_text().splitlines() if "torch.load(" in line]
    assert loads
    assert all("weights_only=True" in line for line in loads)


@pytest.mark.parametrize(("keep", "best"), [(1, None), (1, 6), (2, 1), (3, 4)])
def test_the_latest_and_the_best_are_kept(tmp_path, keep, best):
    checkpoints = Checkpoints(tmp_path, keep)
    for step in range(1, 7):
        save_and_wait(checkpoints, checkpoint(step), best)
    latest = list(range(7 - keep, 7))
    assert saved_steps(checkpoints.root) == sorted({*latest, *([best] if best else [])})
    assert intact_step(checkpoints.latest()) == 6


def test_keep_0_deletes_all_checkpoints_once_the_run_is_done(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=0)
    for step in (1, 2, 3):
        save_and_wait(checkpoints, checkpoint(step), best_step=1)
    assert saved_steps(checkpoints.root) == [1, 3], "until then, one to go on from, and the best"
    prune(checkpoints.root, keep=0)
    assert list(checkpoints.root.iterdir()) == []
    prune(tmp_path / "without any", keep=0)


def test_only_what_interrupted_saves_and_deletions_have_left_is_deleted(two):
    others = {"step_7", "step_000000009", "step_last", "notes", "tmp.notes", "thesis.pruned", "tmp.step_1", "x.pruned2"}
    others |= {"step_00000001.corrupt", "step_00000001.superseded", "step_00000002.corrupt2"}
    leftovers = ("tmp.step_00000003", "step_00000001.pruned")
    for name in (*others, *leftovers):
        (two.root / name).mkdir()
    (two.root / "step_00000002" / "more").write_text("later, and not in the manifest")
    prune(two.root, keep=None)
    assert {path.name for path in two.root.iterdir()} == {*others, "step_00000001", "step_00000002"}
    assert intact_step(two.latest()) == 2
    save_and_wait(two, checkpoint(3))
    assert {path.name for path in two.root.iterdir()} == {*others, "step_00000002", "step_00000003"}


@pytest.mark.parametrize("call", ["replace", "rmtree"])
def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(two, monkeypatch, caplog, call):
    owner: Any = {"replace": os, "rmtree": shutil}[call]
    original = getattr(owner, call)

    def refused(path: Path, *others: Any, **options: Any) -> None:
        if "step_00000001" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        original(path, *others, **options)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="runner"):
        patched.setattr(owner, call, refused)
        assert save_and_wait(two, checkpoint(3)) == two.root / "step_00000003"
    assert intact_step(two.latest()) == 3
    is_there = (two.root / "step_00000001").exists()
    assert is_there == (call == "replace"), "an interrupted deletion leaves no partial checkpoint"
    [record] = caplog.records
    assert "step_00000001" in record.getMessage()
    assert "step_00000003" not in record.getMessage()
    save_and_wait(two, checkpoint(4))  # this tries to delete it again
    assert {path.name for path in two.root.iterdir()} == {"step_00000003", "step_00000004"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_mode_of_all_files_follows_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = save_and_wait(Checkpoints(tmp_path, keep=1, texts={CONFIG: lambda: "a: 1"}), checkpoint(1))
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert len(modes) == 5
    assert set(modes.values()) == {mode}, modes


def test_a_checkpoint_contains_the_config_of_its_run(tmp_path):
    text = config_text({"lr": 0.1, "name": "ü", "none": None})
    checkpoints = Checkpoints(tmp_path, keep=1, texts={CONFIG: lambda: text})
    path = save_and_wait(checkpoints, checkpoint(1))
    assert saved_text(path, CONFIG) == text
    assert intact_step(checkpoints.latest()) == 1
    (path / "state.pt").unlink()
    assert saved_text(path, CONFIG) == text, "the other files do not matter"
    (path / "config.yaml").write_text(text.replace("0.1", "0.2"))
    with pytest.raises(DamagedError, match=r"config\.yaml"):
        saved_text(path, CONFIG)
    (path / "config.yaml").unlink()
    with pytest.raises(DamagedError, match=r"config\.yaml"):
        saved_text(path, CONFIG)
    text = config_text({"name": "x" * 1_000_000})
    with pytest.raises(ConfigError, match="1,000,000 bytes"):  # its hash is correct, but reading would take a minute
        saved_text(save_and_wait(checkpoints, checkpoint(2)), CONFIG)


def test_a_checkpoint_is_readable_without_this_project(trained):
    """It has plain names, full tensors, the state of the optimizer by name, and the hashes of its files."""
    run = trained("steps=2", "optimizer=adam", "compile=false", "model.dropout=0.1")
    path = run.directory / "checkpoints/step_00000002"
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors.values())
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    first, second = torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Conv2d(16, 32, 3, padding=1)
    hidden, head = torch.nn.Linear(128, 64), torch.nn.Linear(64, 10)
    for name, layer in (("conv1.conv", first), ("conv2.conv", second), ("hidden.fc", hidden), ("head.fc", head)):
        layer.load_state_dict({kind: tensors.pop(f"{name}.{kind}") for kind in ("weight", "bias")})
    relu, pool = torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    plain = torch.nn.Sequential(first, relu, pool, second, relu, pool, torch.nn.Flatten(), hidden, relu, head)
    assert not tensors, "nothing but the weights is in there"
    held_out = run.run.workload.held_out  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        outputs = plain(held_out.inputs)
    loss = torch.nn.functional.cross_entropy(outputs, held_out.targets).item()
    assert loss == pytest.approx(run.result.metrics["eval/loss"], rel=1e-6)
    accuracy = (outputs.argmax(1) == held_out.targets).double().mean().item()
    assert accuracy == pytest.approx(run.result.metrics["eval/accuracy"])

    state = torch.load(path / "state.pt", weights_only=True)
    assert state["optimizer"].keys() == shapes.keys()
    for name, moments in state["optimizer"].items():
        assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert (moments["exp_avg"].shape, moments["step"]) == (shapes[name], 2)
    assert zipfile.is_zipfile(path / "state.pt"), "torch's format, not a bare pickle"
    manifest = json.loads((path / "manifest.json").read_text())
    hashes = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in path.iterdir() if f.name != "manifest.json"}
    assert hashes.keys() == {"model.safetensors", "state.pt", "rank_0.pt", "config.yaml", "model.json"}
    assert manifest["files"] == hashes
    assert (manifest["schema"], manifest["step"], manifest["world_size"]) == (2, 2, 1)


def test_a_failed_write_leaves_the_earlier_checkpoints(two, monkeypatch):
    for owner, name in ((torch, "save"), (safetensors.torch, "save_file"), (os, "fsync"), (Path, "mkdir")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            with pytest.raises(StorageError) as caught:
                save_and_wait(two, checkpoint(3))
        assert caught.value.why == "No space left on device"
        assert saved_steps(two.root) == [1, 2]
        assert not list(two.root.glob("tmp.*")), "the room is given back"
    assert intact_step(two.latest()) == 2


def test_the_best_checkpoint_of_a_run_is_kept(trained):
    run = trained("steps=12", "eval_every=2", "save_every=2", "keep=1", "optimizer.lr=0.3")
    steps = saved_steps(run.directory / "checkpoints")
    assert steps == sorted({12, run.result.best["step"]})
    assert build_composed_run(*TINY_CPU).keep == 2, "the default keeps a second one, should the newest be damaged"


def test_a_step_that_was_not_saved_is_refused_and_the_saved_steps_are_listed(tmp_path):
    for name in ("step_00000000", "step_99999999", "step_100000000", "step_00000007.superseded"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert chosen_checkpoint(tmp_path, 100_000_000) == tmp_path / "checkpoints" / "step_100000000"
    for choice in (7, "newest", -1):
        with pytest.raises(ConfigError) as refused:
            chosen_checkpoint(tmp_path, choice)
        assert (refused.value.key, refused.value.got) == ("checkpoint", choice)
        assert refused.value.remedy == "choose best, last, or one of 0, 99999999, 100000000"


@pytest.mark.parametrize("choice", ["best", "last", 7])
def test_checkpoints_that_cannot_be_read_are_refused_with_the_reason(choice, tmp_path):
    (tmp_path / "checkpoints" / "step_00000007").mkdir(parents=True)
    for path, bits in ((tmp_path, 0), (tmp_path / "checkpoints", 0)):
        with enforced_permissions(path, bits), pytest.raises(ConfigError, match="Permission denied") as refused:
            chosen_checkpoint(tmp_path, choice)
        assert refused.value.key == "checkpoint"
