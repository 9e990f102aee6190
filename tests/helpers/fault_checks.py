"""Checks of a run and of its commands that must pass after any fault."""

import json
import re
from pathlib import Path
from typing import Any

import torch

from helpers.command import processes_in, wait_until
from helpers.events import scalar_curves
from helpers.runs import held_resources, listening_inodes, newest_checkpoint, run_outcome
from runner.storage.checkpoint import load
from runner.storage.manifest import verified_manifest


def run_results(run: Path) -> dict[str, Any]:
    """Return all computed results in the run directory `run`, without times, memory, and how it was started."""
    result = json.loads((run / "result.json").read_text())
    newest = newest_checkpoint(run)
    ranks = {path.name: torch.load(path, weights_only=True) for path in sorted(newest.glob("rank_*.pt"))}
    computed = run_outcome(run)
    for kind in ("curves", "images"):
        computed[kind] = {tag: of for tag, of in computed[kind].items() if not tag.startswith("pipeline/")}
    return computed | {"ranks": ranks, "result": {key: result[key] for key in ("status", "steps", "metrics", "best")}}


def assert_one_value_per_step(run: Path) -> None:
    """Fail unless each curve, as TensorBoard shows it, has one value for each step at which it was logged."""
    for tag, points in scalar_curves(run).items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), (tag, steps)


def steps_saved(cwd: Path) -> int:
    """The latest step whose checkpoint a command in `cwd` has committed; 0 if none."""
    path = cwd / "saved.txt"
    return max(map(int, path.read_text().split()), default=0) if path.exists() else 0


def assert_each_sample_once(cwd: Path, mode: str, num_samples: int, limit: int) -> None:
    """Fail unless all sessions together read each sample once per epoch, and none redid more than `limit` steps.

    `seen.txt` has a line for each step: the process and its id, the steps of the run and of the process, the samples.
    """
    streams: dict[str, dict[int, list[str]]] = {}
    latest: dict[str, tuple[int, int]] = {}  # the last process id and the latest step of each process
    for line in (cwd / "seen.txt").read_text().splitlines():
        process, pid, step, own_step, samples = json.loads(line)
        first = streams.setdefault(process, {}).setdefault(own_step, samples)
        assert first == samples, f"step {own_step} was redone with other samples"
        last_pid, last = latest.get(process, (pid, 0))
        redone = last - step + 1 if pid != last_pid else 0
        assert redone <= limit, f"{process} redid {redone} steps"
        latest[process] = pid, max(last, step)
    for process, own in _divided(streams, mode).items():
        assert sorted(own) == list(range(1, len(own) + 1)), f"steps of {process}: {sorted(own)}"
        stream = [sample for step in sorted(own) for sample in own[step]]
        assert len(stream) >= num_samples, "not even one epoch"
        for start in range(0, len(stream), num_samples):
            epoch = stream[start : start + num_samples]
            assert len(set(epoch)) == len(epoch), f"{process} read a sample twice in an epoch"


def _divided(streams: dict[str, dict[int, list[str]]], mode: str) -> dict[str, dict[int, list[str]]]:
    """The samples that each model is trained on, by step; those of processes that train one model are merged."""
    names = sorted(streams)
    if mode in ("ddp", "fsdp"):  # the ranks divide the samples of each step
        steps = {tuple(sorted(own)) for own in streams.values()}
        assert len(steps) == 1, "the ranks did different steps"
        return {"all": {step: [s for name in names for s in streams[name][step]] for step in streams[names[0]]}}
    if mode == "hogwild":  # the ranks divide the steps
        return {"all": {step: samples for own in streams.values() for step, samples in own.items()}}
    return streams


def assert_newest_checkpoint_valid(run: Path, saved: int = 0) -> int:
    """Fail unless the newest checkpoint is valid and not older than step `saved`; return its step, 0 if none."""
    if saved == 0 and not list(run.glob("checkpoints/step_????????")):
        return 0
    newest = newest_checkpoint(run)
    loaded = load(newest)
    for rank in range(1, verified_manifest(newest)["world_size"]):
        assert load(newest, rank).local, f"rank {rank} has no state in {newest.name}"
    assert loaded.step == int(newest.name[5:]) >= saved
    return loaded.step


def check_newest_while_running(run: Path) -> None:
    """Fail if the newest checkpoint is invalid, and not only because the run saved or deleted one meanwhile."""
    before = set(run.glob("checkpoints/step_????????"))
    try:
        assert_newest_checkpoint_valid(run)
    except Exception:
        if before == set(run.glob("checkpoints/step_????????")):
            raise


def assert_no_temporary_files(run: Path) -> None:
    """Fail if a temporary or a damaged file is left in the directory of a finished run."""
    patterns = ("**/*.part", "**/.*.part", *(f"checkpoints/{name}" for name in ("tmp.*", "*.pruned*", "*.corrupt*")))
    found = [path.name for pattern in patterns for path in run.glob(pattern)]
    assert not found, found


class ExternalResources:
    """The processes, ports, shared memory and, in `temporary`, files of the commands in `cwd`."""

    def __init__(self, cwd: Path, temporary: Path | None = None):
        self.cwd, self.temporary = cwd, temporary
        self.sockets: set[str] = set()
        self.shared: set[str] = set()
        self.pids: set[int] = set()
        self.earlier = _shared_memory()  # left by others, perhaps by a process with a number that is used again
        self.sample()

    def sample(self) -> None:
        sockets, shared = held_resources(self.cwd)
        self.sockets |= sockets
        self.shared |= shared
        self.pids |= set(processes_in(self.cwd))

    def assert_released(self) -> None:
        """Fail unless everything is released soon; the kernel closes a socket shortly after its process has ended."""
        wait_until(lambda: not processes_in(self.cwd), what="a process is left behind")
        wait_until(lambda: not self.sockets & listening_inodes(), what="a port is left open")
        try:
            wait_until(lambda: not self._files())
        except AssertionError:
            raise AssertionError(f"left in shared memory or among the temporary files: {self._files()}") from None

    def _files(self) -> list[str]:
        # The resource tracker, which all commands of a server share, unlinks semaphores when the server ends.
        kept = "/dev/shm/sem.mp-" if self.temporary is None else "none"
        found = [name for name in self.shared if Path(name).exists() and not name.startswith(kept)]
        theirs = re.compile(rf"torch_({'|'.join(map(str, self.pids)) or 'none'})_")
        found += filter(theirs.match, _shared_memory() - self.earlier)
        if self.temporary is not None:
            # The compiler cache of torch is shared by all processes of a user, and persists.
            found += [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        return found


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}
