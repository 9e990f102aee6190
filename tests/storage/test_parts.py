"""Tests of parts of checkpoints, which later checkpoints share by hard links: crashes, retention, damage, and ranks."""

import os
from unittest import mock

import pytest
import torch
from helpers.handmade_runs import begin_to_save, checkpoints_of_two_ranks, save_and_wait
from helpers.power_loss import DiskRecorder, possible_states, write_state

from runner.storage.checkpoint import Checkpoint, Part, load
from runner.storage.checkpoints import Checkpoints
from runner.storage.manifest import DamagedError, verified_manifest
from runner.storage.run_directory import StorageError


def content_of(name: str) -> bytes:
    return name.encode() * 1000


def checkpoint(step: int, names: str) -> Checkpoint:
    """Return a checkpoint with a part for each letter of `names`."""
    parts = {name: Part(lambda file, name=name: file.write(content_of(name))) for name in names}
    return Checkpoint(step, {"w": torch.full((2,), float(step))}, {"best": {}}, {"names": names}, {}, parts)


def assert_whole(found: Checkpoint | None) -> None:
    assert found is not None
    assert found.tensors["w"].tolist() == [found.step] * 2
    assert "".join(found.part_files) == found.local["names"]
    for name, path in found.part_files.items():
        assert path.read_bytes() == content_of(name)


def test_a_part_is_written_once_and_deleted_with_the_last_checkpoint_that_has_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step, names in ((1, "ab"), (2, "abc"), (3, "bcd"), (4, "de")):
        path = save_and_wait(checkpoints, checkpoint(step, names), best_step=2)
        for kept in {path, checkpoints.root / "step_00000002"} if step > 1 else {path}:
            assert_whole(load(kept))
    assert {path.name for path in checkpoints.root.iterdir()} == {"step_00000002", "step_00000004"}
    links = {file.name: file.stat().st_nlink for file in checkpoints.root.rglob("*.bin")}
    assert links == {f"rank_0_{name}.bin": 1 for name in "abcde"}


def test_a_resumed_run_shares_the_parts_of_the_checkpoint_that_it_has_loaded(tmp_path):
    save_and_wait(Checkpoints(tmp_path, keep=3), checkpoint(1, "ab"))
    resumed = Checkpoints(tmp_path, keep=3)
    assert_whole(resumed.latest())
    path = save_and_wait(resumed, checkpoint(2, "abc"))
    assert_whole(load(path))
    shared = {file.name[7]: file.stat().st_nlink for file in path.glob("*.bin")}
    assert shared == {"a": 2, "b": 2, "c": 1}
    # Another run knows nothing of these parts: what it calls `a` may be something else.
    other = save_and_wait(Checkpoints(tmp_path, keep=3), checkpoint(3, "a"))
    assert next(other.glob("*.bin")).stat().st_nlink == 1


def test_without_hard_links_parts_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=PermissionError("this file system has none")))
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, names in ((1, "ab"), (2, "abc")):
        assert_whole(load(save_and_wait(checkpoints, checkpoint(step, names))))
    assert {file.stat().st_nlink for file in checkpoints.root.rglob("*.bin")} == {1}


def test_a_crash_or_a_power_loss_at_any_call_leaves_an_intact_checkpoint_with_all_parts(tmp_path):
    """Of what is not synced, any names and any part of the content may be lost."""
    run = tmp_path / "run"
    run.mkdir()
    with DiskRecorder(run) as recorder:
        checkpoints = Checkpoints(run, keep=1)
        for step, names in ((1, "ab"), (2, "bc")):
            save_and_wait(checkpoints, checkpoint(step, names))
            recorder.mark = step
    every = list(possible_states([instant for instant in recorder.instants if instant.mark]))
    for number, (instant, state) in enumerate(every):
        write_state(state, tmp_path / str(number))
        checkpoints = Checkpoints(tmp_path / str(number), keep=1)
        found = checkpoints.latest()
        assert_whole(found)
        assert found is not None
        assert found.step in range(instant.mark, 3), sorted(state)
        assert not list(checkpoints.root.glob("*.corrupt*")), sorted(state)
        save_and_wait(checkpoints, checkpoint(3, "c"))  # the next session deletes leftovers
        assert [path.name for path in checkpoints.root.iterdir()] == ["step_00000003"]
    assert len(every) > 30


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_part_is_found_and_the_previous_checkpoint_is_loaded(damage, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step, names in ((1, "ab"), (2, "abc")):
        path = save_and_wait(checkpoints, checkpoint(step, names))
    part = path / "rank_0_c.bin"
    part.unlink() if damage == "missing" else part.write_bytes(content_of("x"))
    with pytest.raises(DamagedError):
        verified_manifest(path)
    found = Checkpoints(tmp_path, keep=3).latest()
    assert found is not None
    assert found.step == 1
    assert_whole(found)


def test_the_training_does_not_wait_for_parts_that_cannot_be_written(tmp_path):
    failing = checkpoint(1, "ab")
    failing.parts["b"] = Part(mock.Mock(side_effect=OSError(28, "No space left on device")))
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(failing)
    assert failing.parts["b"].written.wait(60)
    with pytest.raises(StorageError, match="No space left"):
        checkpoints.wait()
    assert not list(checkpoints.root.iterdir()), "the log needs the space"


def test_each_rank_has_its_own_parts(tmp_path):
    ranks = checkpoints_of_two_ranks(tmp_path)
    for step, names in ((1, "ab"), (2, "abc")):
        begin_to_save(ranks, [checkpoint(step, names), checkpoint(step, names.upper())])
    for rank, names in enumerate(("abc", "ABC")):
        ranks[rank].wait()
        found = load(tmp_path / "checkpoints/step_00000002", rank)
        assert "".join(found.part_files) == names
        assert_whole(found)
