"""What must hold after any fault, whatever it was. All scenarios of tests/faults are judged by these functions.

assert_same_trace(run, reference)          weights, optimizer and random state, curves, images, result: bit for bit
assert_one_value_a_step(run)               each curve has one value a step, in order
assert_each_sample_once(cwd, mode, limit)  in each epoch, whatever was killed; no more than `limit` steps are redone
assert_whole_checkpoint(run, saved)        the newest checkpoint verifies, and it is not older than what was saved
assert_no_scraps(run)                      no temporary or damaged file is left in the run directory
Leftovers(cwd)                             no process, port, shared memory or temporary file is left outside of it
assert_ended(code, console, wanted, says)  the right exit code and words, and no traceback
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers.command import processes_in, until
from helpers.events import curves
from helpers.runs import assert_same, held_in, listening, newest_checkpoint, outcome
from runner.storage.checkpoint import load

RESULTS = ("status", "steps", "metrics", "best")
"""What a run computed, in `result.json`; the rest are times, memory, and how it was started."""

MEASURED = "pipeline/"
"""Begins the tags of what is measured by a clock, besides `time/` and `memory/`."""


# ---------------------------------------------------------------------------------------------------------------------
# What was computed


def trace(run: Path) -> dict[str, Any]:
    """Everything that the run directory `run` says of what was computed, without times and memory."""
    result = json.loads((run / "result.json").read_text())
    newest = newest_checkpoint(run)
    ranks = {path.name: torch.load(path, weights_only=True) for path in sorted(newest.glob("rank_*.pt"))}
    computed = outcome(run)
    for kind in ("curves", "images"):
        computed[kind] = {tag: of for tag, of in computed[kind].items() if not tag.startswith(MEASURED)}
    return computed | {"ranks": ranks, "result": {key: result[key] for key in RESULTS}}


def assert_same_trace(run: Path, reference: dict[str, Any]) -> None:
    """Fail unless `trace(run)` is `reference`, the trace of a run that nothing disturbed."""
    assert_same(trace(run), reference)


def assert_one_value_a_step(run: Path) -> None:
    """Fail unless each curve, as TensorBoard shows it, has one value for each step at which it was logged."""
    for tag, points in curves(run).items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), (tag, steps)


# ---------------------------------------------------------------------------------------------------------------------
# What it was computed from


class Seen(NamedTuple):
    """A training step of one process: the samples that it read, see `fault_points`."""

    process: str
    pid: int
    step: int
    own: int
    samples: list[str]


def read_seen(cwd: Path) -> list[Seen]:
    """All training steps of the commands in `cwd`, in the order in which they were done."""
    steps = []
    for line in (cwd / "seen.txt").read_text().splitlines():
        if not line.startswith("saved "):
            found = re.fullmatch(r"(\S+(?: \d+)?) (\d+) (\d+) (\d+) (\S+)", line)
            assert found, line
            name, pid, step, own, samples = found.groups()
            steps.append(Seen(name, int(pid), int(step), int(own), samples.split(",")))
    return steps


def steps_saved(cwd: Path) -> int:
    """The latest step whose checkpoint a command in `cwd` has committed; 0 if none."""
    path = cwd / "seen.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((int(line.split()[1]) for line in lines if line.startswith("saved ")), default=0)


def assert_each_sample_once(cwd: Path, mode: str, num_samples: int, limit: int) -> None:
    """Fail unless the steps, put together from all sessions, read each sample once an epoch.

    Args:
        mode: says how the processes divide the samples.
        num_samples: samples in an epoch.
        limit: how many steps may at most be redone after a fault: those between two checkpoints.
    """
    seen = read_seen(cwd)
    streams: dict[str, dict[int, list[str]]] = {}
    for each in seen:
        own = streams.setdefault(each.process, {})
        assert own.setdefault(each.own, each.samples) == each.samples, f"step {each.own} was redone with other samples"
    for process, own in _divided(streams, mode).items():
        assert sorted(own) == list(range(1, len(own) + 1)), f"steps of {process}: {sorted(own)}"
        stream = [sample for step in sorted(own) for sample in own[step]]
        assert len(stream) >= num_samples, "not even one epoch"
        for start in range(0, len(stream), num_samples):
            epoch = stream[start : start + num_samples]
            assert len(set(epoch)) == len(epoch), f"{process} read a sample twice in an epoch"
    for process in streams:
        redone = steps_redone([each for each in seen if each.process == process])
        assert redone <= limit, f"{process} redid {redone} steps"


def _divided(streams: dict[str, dict[int, list[str]]], mode: str) -> dict[str, dict[int, list[str]]]:
    """The stream of samples of each model: that of several processes together where they divide it."""
    names = sorted(streams)
    if mode in ("ddp", "fsdp"):  # the samples of each step
        steps = {tuple(sorted(own)) for own in streams.values()}
        assert len(steps) == 1, "the ranks did different steps"
        return {"all": {step: [s for name in names for s in streams[name][step]] for step in streams[names[0]]}}
    if mode == "hogwild":  # the steps
        return {"all": {step: samples for own in streams.values() for step, samples in own.items()}}
    return streams


def steps_redone(seen: Iterable[Seen]) -> int:
    """The most steps that a process did again after a resume."""
    most, last, pid = 0, 0, 0
    for each in seen:
        if each.pid != pid:
            most, pid = max(most, last - each.step + 1), each.pid
        last = max(last, each.step)
    return most


# ---------------------------------------------------------------------------------------------------------------------
# What is on the disk


def assert_whole_checkpoint(run: Path, saved: int = 0) -> int:
    """Fail unless the newest checkpoint is whole; returns its step, 0 if there is none.

    Args:
        saved: the latest step that is known to have been saved.
    """
    if saved == 0 and not list(run.glob("checkpoints/step_????????")):
        return 0
    newest = newest_checkpoint(run)
    loaded = load(newest)
    for rank in range(1, loaded.world_size):
        assert load(newest, rank).local, f"rank {rank} has no state in {newest.name}"
    assert loaded.step == int(newest.name[5:]) >= saved
    return loaded.step


def whole_checkpoint_now(run: Path) -> bool:
    """Whether the newest checkpoint of a run that goes on is whole; it may be replaced by a newer one meanwhile."""
    before = set(run.glob("checkpoints/step_????????"))
    try:
        assert_whole_checkpoint(run)
    except Exception:
        if before == set(run.glob("checkpoints/step_????????")):
            raise
        return False
    return bool(before)


SCRAPS = ("**/*.part", "**/.*.part", "checkpoints/tmp.*", "checkpoints/*.pruned*", "checkpoints/*.corrupt*")


def assert_no_scraps(run: Path) -> None:
    """Fail if a temporary or a damaged file is left in the directory of a run that is done."""
    found = [path.name for pattern in SCRAPS for path in run.glob(pattern)]
    assert not found, found


# ---------------------------------------------------------------------------------------------------------------------
# What is elsewhere


class Leftovers:
    """What the commands in `cwd` hold outside of it: made before they start; `sample` while they run.

    Args:
        temporary: their own directory of temporary files; None: they share that of this machine.
    """

    def __init__(self, cwd: Path, temporary: Path | None = None):
        self.cwd, self.temporary = cwd, temporary
        self.sockets: set[str] = set()
        self.shared: set[str] = set()
        self.pids: set[int] = set()
        self.sample()

    def sample(self) -> None:
        """Note what they hold now."""
        sockets, shared = held_in(self.cwd)
        self.sockets |= sockets
        self.shared |= shared
        self.pids |= set(processes_in(self.cwd))

    def assert_none(self) -> None:
        """Fail unless all of it goes away: the kernel closes a socket a moment after its process has ended."""
        until(lambda: not processes_in(self.cwd), what="a process is left behind")
        until(lambda: not self.sockets & listening(), what="a port is left open")
        try:
            until(lambda: not self._files())
        except AssertionError:
            raise AssertionError(f"left in shared memory or among the temporary files: {self._files()}") from None

    def _files(self) -> list[str]:
        """Names in shared memory and of temporary files that are theirs."""
        # Semaphores of queues are unlinked by a process that the commands of a server share, when the server ends.
        kept = "/dev/shm/sem.mp-" if self.temporary is None else "none"
        found = [name for name in self.shared if Path(name).exists() and not name.startswith(kept)]
        with suppress(OSError):
            theirs = re.compile(rf"torch_({'|'.join(map(str, self.pids)) or 'none'})_")
            found += [path.name for path in Path("/dev/shm").iterdir() if theirs.match(path.name)]
        if self.temporary is not None:
            # The compiler's cache is torch's own, one per user, and meant to stay.
            found += [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        return found


# ---------------------------------------------------------------------------------------------------------------------
# What it said


def assert_ended(code: int | None, console: str, wanted: int, says: str = "", traceback: bool = False) -> None:
    """Fail unless a command ended with the exit code `wanted`, said `says`, and printed no traceback.

    Args:
        says: a regular expression that the console matches somewhere.
        traceback: whether it may print one, of an error that only its author understands.
    """
    assert code == wanted, f"exit code {code} instead of {wanted}:\n{console}"
    assert re.search(says, console, re.MULTILINE), f"it does not say {says!r}:\n{console}"
    assert traceback or "Traceback" not in console, console
