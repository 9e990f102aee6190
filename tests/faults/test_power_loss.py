"""Tests of a power loss at any time: saved checkpoints are intact, and the resumed run has the same results.

The file system changes of two runs are recorded: a run of three sessions, and a run with `keep=0`. From these changes,
the tests derive the states in which a power loss may leave the disk, and try a sample of them. The sample is larger
with `RUNNER_FAULTS=all`.
"""

import copy
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from helpers.compose import TINY_CPU, build_composed_run, prepare_session
from helpers.events import MEASURED, scalar_curves
from helpers.faults import RUN_ALL_FAULTS as ALL
from helpers.power_loss import DiskRecorder, DiskState, minimal_states, possible_states, write_state
from helpers.runs import assert_bitwise_equal, run_outcome

from runner.api.run_job import run_one
from runner.config.errors import ConfigError
from runner.parallel.session import Session
from runner.resume.starting_point import claimed_directory
from runner.run import Run, build_run, config_hash
from runner.storage.checkpoint import Checkpoint
from runner.storage.checkpoints import Checkpoints
from runner.storage.run_directory import read_result
from runner.storage.saved_run import UnreadableConfigError, saved_config
from runner.tracking.event_file import EventFile

STATES, RESUMES = (600, 20) if ALL else (45, 2)
OPTIONS = (*TINY_CPU, "save_every=2", "eval_every=3", "log_every=1", "name=a")


class Mark(NamedTuple):
    """The config hash of the current session, and the step of the newest checkpoint that must survive a power loss."""

    session: str = ""
    saved: int = 0


class Reference(NamedTuple):
    """The results of a session; the checkpoints, by step, include those of earlier sessions that it continues."""

    run: Run
    checkpoints: dict[int, Checkpoint]
    curves: dict[str, list[tuple[int, float]]]
    outcome: dict[str, Any]  # empty if the run has `keep=0`


class Recorded:
    """Sessions that run one after another below `root`: the disk at each instant, and their results by config hash."""

    def __init__(self, root: Path):
        self.root, self.recorder = root, DiskRecorder(root)
        self.references: dict[str, Reference] = {}

    def run(self, *overrides: str, continued: int = 0) -> Path:
        """Run a session that continues after the step `continued`, and return the run directory."""
        run = build_composed_run(*OPTIONS, f"output_root={self.root}/outputs", *overrides)
        earlier = [*self.references.values()][-1].checkpoints if continued else {}
        found = {step: checkpoint for step, checkpoint in earlier.items() if step <= continued}
        session = config_hash(run.config)
        self.recorder.mark = Mark(session, continued)
        save = Checkpoints.save

        def saved(checkpoints: Checkpoints, checkpoint: Checkpoint, best_step: int | None = None) -> None:
            found[checkpoint.step] = copy.deepcopy(checkpoint)
            save(checkpoints, checkpoint, best_step)
            checkpoints.wait()  # from here on, it must survive a power loss
            self.recorder.mark = Mark(session, checkpoint.step)

        with mock.patch.object(Checkpoints, "save", saved):
            assert run_one(run, list(overrides)).status == "done"
        [path] = self.root.glob("outputs/a/*")
        self.references[session] = Reference(
            run, found, scalar_curves(path, without=MEASURED), run_outcome(path) if run.keep else {}
        )
        return path


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Recorded:
    """A run of 6 steps, extended to 10 steps, then resumed from step 8 with another learning rate."""
    recorded = Recorded(tmp_path_factory.mktemp("resumed"))
    with recorded.recorder:
        path = recorded.run("steps=6")
        recorded.run("steps=10", f"resume={path}", continued=6)
        recorded.run("steps=12", "optimizer.lr=0.01", f"resume={path}/checkpoints/step_00000008", continued=8)
    return recorded


@pytest.fixture(scope="module")
def keeping_none(tmp_path_factory) -> Recorded:
    """A run whose checkpoints are deleted at its end."""
    recorded = Recorded(tmp_path_factory.mktemp("keeping_none"))
    with recorded.recorder:
        recorded.run("steps=4", "keep=0")
    return recorded


def chosen(recorded: Recorded, count: int) -> list[tuple[int, DiskState, dict[str, bytes | None]]]:
    """Sample `count` states with their numbers; states in which all unsynced data is lost come first."""
    instants = recorded.recorder.instants
    every = [(number, *state) for number, state in enumerate(possible_states(instants if ALL else instants[::3]))]
    least = [(-number, *state) for number, state in enumerate(minimal_states(instants), start=1)]
    draw = random.Random(count)
    if len(least) > count // 2:
        least = draw.sample(least, count // 2)
    return least + draw.sample(every, min(len(every), count - len(least)))


def check_next_session(recorded: Recorded, mark: Mark, root: Path, number: int) -> None:
    """Fail unless the next session finds the run and what it saved; only a run without checkpoints may be lost.

    Args:
        mark: what must have survived the power loss.
        root: the directory that contains the files.
        number: the number of the state; if it is odd, the run is resumed with `resume=auto`, otherwise by its path.
    """
    try:
        [path] = root.glob("outputs/a/*")
        values = saved_config(path).values
    except (ValueError, UnreadableConfigError):
        assert not mark.saved, "a checkpoint was saved, and there is no run to resume"
        return
    reference = recorded.references[config_hash(values)]
    run, session = prepared(values, "auto" if number % 2 else str(path))
    with claimed_directory(run, session, path.parent, None, []) as claim:
        if claim.path != path:
            assert run.resume != "auto" or read_result(path), "the run begins anew"
            return
        if claim.result is not None:
            assert claim.result["steps"] == max(reference.checkpoints)
            if reference.run.keep:
                assert_content(Checkpoints(path, keep=2).latest(), reference)
            return
        claim.begin()
        found = Checkpoints(path, keep=2).latest()
        step = found.step if found else 0
        assert step >= mark.saved, "a checkpoint that was saved is lost"
        assert not list(path.rglob("*.corrupt*")), "a checkpoint was damaged"
        if found is not None:
            assert_content(found, reference)
            EventFile(path, step + 1).close()
            logged = scalar_curves(path)
            for tag, points in reference.curves.items():
                before, wanted = ([each for each in of if each[0] <= step] for of in (logged.get(tag, []), points))
                assert before == wanted, tag


def assert_content(found: Checkpoint | None, reference: Reference) -> None:
    assert found is not None
    wanted = reference.checkpoints[found.step]
    for part in ("tensors", "state", "local"):
        assert_bitwise_equal(getattr(found, part), getattr(wanted, part), part)


_PREPARED: dict[str, tuple[Run, Session]] = {}


def prepared(values: dict[str, Any], resume: str) -> tuple[Run, Session]:
    """Return the run of a saved config, with another `resume`, and its session; the data is loaded only once."""
    if (key := config_hash(values)) not in _PREPARED:
        run = build_run(values)
        _PREPARED[key] = run, prepare_session(run)
    run, session = _PREPARED[key]
    run = copy.copy(run)
    run.resume = resume
    return run, session


@pytest.mark.parametrize("kind", ["resumed", "keeping_none"])
def test_whatever_a_power_loss_leaves_the_run_goes_on_from_it(kind, request, tmp_path):
    recorded: Recorded = request.getfixturevalue(kind)
    tried = 0
    for number, instant, state in chosen(recorded, STATES if kind == "resumed" else STATES // 3):
        root = tmp_path / str(number)
        root.mkdir()
        write_state(state, root)
        try:
            check_next_session(recorded, instant.mark or Mark(), root, number)
        except (AssertionError, ConfigError) as error:
            pytest.fail(f"state {number}, {instant.call}, {instant.mark}, {sorted(state)}: {error!r}")
        tried += 1
        shutil.rmtree(root)
    assert tried >= STATES // 3, "too few different states"


def test_small_files_are_never_partially_written(resumed):
    """Files that are rewritten during a run have either their old or their new content."""
    whole = set(resumed.recorder.instants[-1].written.values())
    for _, _, state in chosen(resumed, 20 * STATES):
        for path, content in state.items():
            if path.endswith((".yaml", ".json")) and "/tmp." not in path and ".pruned" not in path:
                assert content in whole, path


def test_a_run_resumed_after_a_power_loss_has_the_same_results(resumed, tmp_path):
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
