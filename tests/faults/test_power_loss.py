"""Tests of a power loss at any time: saved checkpoints are intact, and the resumed run has the same results.

The file system changes of two runs are recorded: a run of three sessions, and a run with `keep=0`. From these changes,
the tests derive the states in which a power loss may leave the disk, and try a sample of them. The sample is larger
with `RUNNER_FAULTS=all`.
"""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from helpers.compose import TINY_CPU, build_composed_run, prepare_session
from helpers.events import scalar_curves
from helpers.faults import RUN_ALL_FAULTS as ALL
from helpers.power_loss import DiskRecorder, DiskState, minimal_states, possible_states, write_state
from helpers.runs import assert_bitwise_equal, run_outcome

from runner.api.run_job import run_one
from runner.config.errors import ConfigError
from runner.parallel.session import Session
from runner.resume.starting_point import claimed_directory
from runner.run import Run, build_run, config_hash
from runner.storage.checkpoint import Checkpoint
from runner.storage.checkpoint_writing import Checkpoints
from runner.storage.run_directory import read_result
from runner.storage.saved_run import UnreadableConfigError, saved_config
from runner.tracking.event_file import EventFile

STATES, RESUMES = (600, 20) if ALL else (45, 2)
OPTIONS = (*TINY_CPU, "save_every=2", "eval_every=3", "log_every=1", "name=a")


class Mark(NamedTuple):
    """The config hash of the current session, and the step of the newest checkpoint that must survive a power loss."""

    session: str
    saved: int


class Reference(NamedTuple):
    """The results of a session.

    Args:
        run: the run.
        checkpoints: the checkpoints by step, including those of earlier sessions that the session continues.
        curves: the curves without times and memory (see `compared`).
        outcome: what `run_outcome` returns at the end of the session; empty if the run has `keep=0`.
    """

    run: Run
    checkpoints: dict[int, Checkpoint]
    curves: dict[str, list[tuple[int, float]]]
    outcome: dict[str, Any]


class Recorded(NamedTuple):
    instants: list[DiskState]
    references: dict[str, Reference]


class Sessions:
    """Runs sessions one after another below `root`, and records their file system changes and results."""

    def __init__(self, root: Path):
        self.root, self.recorder = root, DiskRecorder(root)
        self.references: dict[str, Reference] = {}

    def run(self, *overrides: str, earlier: dict[int, Checkpoint] | None = None) -> Path:
        """Run a session, and return the run directory; `earlier` has the checkpoints that exist when it begins."""
        run = build_composed_run(*OPTIONS, f"output_root={self.root}/outputs", *overrides)
        found, session = dict(earlier or {}), config_hash(run.config)
        self.recorder.mark = Mark(session, max(found, default=0))
        save = Checkpoints.save

        def saved(checkpoints: Checkpoints, checkpoint: Checkpoint, best_step: int | None = None) -> None:
            found[checkpoint.step] = copy.deepcopy(checkpoint)
            save(checkpoints, checkpoint, best_step)
            checkpoints.wait()  # from here on, it must survive a power loss
            self.recorder.mark = Mark(session, checkpoint.step)

        with mock.patch.object(Checkpoints, "save", saved):
            assert run_one(run, list(overrides)).status == "done"
        [path] = self.root.glob("outputs/a/*")
        whole = run_outcome(path) if run.keep else {}
        self.references[session] = Reference(run, found, compared(path), whole)
        return path

    def checkpoints(self, until: int) -> dict[int, Checkpoint]:
        latest = list(self.references.values())[-1].checkpoints
        return {step: checkpoint for step, checkpoint in latest.items() if step <= until}


def compared(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run, without times and memory."""
    return {tag: points for tag, points in scalar_curves(path).items() if not tag.startswith(("time/", "memory/"))}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run of 6 steps, extended to 10 steps, then resumed from step 8 with another learning rate."""
    sessions = Sessions(tmp_path_factory.mktemp("resumed"))
    with sessions.recorder:
        path = sessions.run("steps=6")
        sessions.run("steps=10", f"resume={path}", earlier=sessions.checkpoints(6))
        earlier = f"resume={path}/checkpoints/step_00000008"
        sessions.run("steps=12", "optimizer.lr=0.01", earlier, earlier=sessions.checkpoints(8))
    return Recorded(sessions.recorder.instants, sessions.references)


@pytest.fixture(scope="module")
def keeping_none(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run whose checkpoints are deleted at its end."""
    sessions = Sessions(tmp_path_factory.mktemp("keeping_none"))
    with sessions.recorder:
        sessions.run("steps=4", "keep=0")
    return Recorded(sessions.recorder.instants, sessions.references)


def chosen(recorded: Recorded, count: int) -> list[tuple[int, DiskState, dict[str, bytes | None]]]:
    """Sample `count` states with their numbers; states in which all unsynced data is lost come first."""
    instants = recorded.instants if ALL else recorded.instants[::3]
    every = [(number, *state) for number, state in enumerate(possible_states(instants))]
    least = [(-number, *state) for number, state in enumerate(minimal_states(recorded.instants), start=1)]
    draw = random.Random(count)
    if len(least) > count // 2:
        least = draw.sample(least, count // 2)
    return least + draw.sample(every, min(len(every), count - len(least)))


class Found:
    """The files that the next session finds after a power loss.

    Args:
        root: the directory that contains the files.
        number: the number of the state; if it is odd, the run is resumed with `resume=auto`, otherwise by its path.
    """

    def __init__(self, recorded: Recorded, instant: DiskState, root: Path, number: int):
        self.recorded, self.mark, self.root, self.number = recorded, instant.mark or Mark("", 0), root, number
        self.runs = list(root.glob("outputs/a/*"))

    def check(self) -> None:
        """Fail unless the next session finds the run and what it saved; only a run without checkpoints may be lost."""
        try:
            [path] = self.runs
            values = saved_config(path).values
        except (ValueError, UnreadableConfigError):
            assert not self.mark.saved, "a checkpoint was saved, and there is no run to resume"
            return
        reference = self.recorded.references[config_hash(values)]
        run, session = prepared(values, "auto" if self.number % 2 else str(path))
        with claimed_directory(run, session, path.parent, None, []) as claim:
            if claim.path != path:
                assert run.resume != "auto" or read_result(path), "the run begins anew"
                return
            if claim.result is not None:
                self._check_done(path, claim.result["steps"], reference)
            else:
                claim.begin()
                self._check_resumed(path, reference)

    def _check_done(self, path: Path, steps: int, reference: Reference) -> None:
        assert steps == max(reference.checkpoints)
        if reference.run.keep:
            assert_content(Checkpoints(path, keep=2).latest(), reference)

    def _check_resumed(self, path: Path, reference: Reference) -> None:
        found = Checkpoints(path, keep=2).latest()
        step = found.step if found else 0
        assert step >= self.mark.saved, "a checkpoint that was saved is lost"
        assert not list(path.rglob("*.corrupt*")), "a checkpoint was damaged"
        if found is not None:
            assert_content(found, reference)
            EventFile(path, step + 1).close()
            logged = {tag: [point for point in points if point[0] <= step] for tag, points in compared(path).items()}
            for tag, points in reference.curves.items():
                wanted = [point for point in points if point[0] <= step]
                assert logged.get(tag, []) == wanted, tag


def assert_content(found: Checkpoint | None, reference: Reference) -> None:
    assert found is not None
    wanted = reference.checkpoints[found.step]
    for part in ("tensors", "state", "local"):
        assert_bitwise_equal(getattr(found, part), getattr(wanted, part), part)


_PREPARED: dict[str, tuple[Run, Session]] = {}


def prepared(values: dict[str, Any], resume: str) -> tuple[Run, Session]:
    """Return the run of a saved config, with another `resume`, and its session; the data is loaded only once."""
    key = config_hash(values)
    if key not in _PREPARED:
        run = build_run(values)
        _PREPARED[key] = run, prepare_session(run)
    run, session = _PREPARED[key]
    run = copy.copy(run)
    run.resume = resume
    return run, session


@pytest.mark.parametrize("kind", ["resumed", "keeping_none"])
def test_whatever_a_power_loss_leaves_the_run_goes_on_from_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    recorded: Recorded = request.getfixturevalue(kind)
    tried = 0
    for number, instant, state in chosen(recorded, STATES if kind == "resumed" else STATES // 3):
        root = tmp_path / str(number)
        root.mkdir()
        write_state(state, root)
        try:
            Found(recorded, instant, root, number).check()
        except (AssertionError, ConfigError) as error:
            pytest.fail(f"state {number}, {instant.call}, {instant.mark}, {sorted(state)}: {error!r}")
        tried += 1
        shutil.rmtree(root)
    assert tried >= STATES // 3, "too few different states"


def test_small_files_are_never_partially_written(resumed: Recorded) -> None:
    """Files that are rewritten during a run have either their old or their new content."""
    whole = set(resumed.instants[-1].written.values())
    for _, _, state in chosen(resumed, 20 * STATES):
        for path, content in state.items():
            if path.endswith((".yaml", ".json")) and "/tmp." not in path and ".pruned" not in path:
                assert content in whole, path


def test_a_run_resumed_after_a_power_loss_has_the_same_results(resumed: Recorded, tmp_path: Path) -> None:
    tried = 0
    for number, _, state in chosen(resumed, RESUMES):
        root = tmp_path / str(number)
        root.mkdir()
        write_state(state, root)
        try:
            [path] = root.glob("outputs/a/*")
            values = saved_config(path).values
        except (ValueError, UnreadableConfigError):
            continue
        reference = resumed.references[config_hash(values)]
        run = build_run(values | {"resume": str(path), "output_root": f"{root}/outputs"})
        assert run_one(run, [f"resume={path}"]).status == "done"
        assert_bitwise_equal(run_outcome(path), reference.outcome)
        tried += 1
    assert tried >= RESUMES // 2
