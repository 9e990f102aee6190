"""Benchmarks of sweeps: their duration, their overhead, and whether a search that is killed loses trials.

`python -m benchmarks.sweep [PART …]` runs the named parts, or all parts if none is named. The jobs train on the CPU.

- `jobs`: the duration of sweeps of 8 and of 32 jobs that each train for half a second. Each sweep is run in two ways:
  with as many jobs at once as the CPU cores allow, and with one job at a time.
- `overhead`: the time of a job without its training; the scheduler's CPU time, its memory and the time to write the
  ledger, in a sweep of 1,000 jobs that end immediately.
- `enumerate`: the time until the first job starts in a sweep of 10,000 combinations, half of which are refused.
- `search`: the best accuracy of 30 trials of 2 epochs on the digits, with TPE and with random search, for five seeds of
  the sampler.
- `kills`: a search that is killed 20 times at random moments, compared with one that is not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.measure import write
from runner.storage.ledger_file import read_ledger
from runner.storage.run_directory import read_result
from runner.sweep.display import Display
from runner.sweep.engines.base import Ended, Job, Pool
from runner.sweep.engines.local import Local
from runner.sweep.ledger import Ledger, console_file
from runner.sweep.scheduler import JobSource, Scheduler
from runner.system.console import DIVERGED, DONE
from runner.system.signals import StopRequest

JOB = ("model=tiny", "data=digits", "epochs=1", "device=cpu", "eval_every=0", "save_every=0")
"""A job that trains for about half a second."""

SEARCH = (
    "optimizer.lr=tag(log,interval(1e-4,1))",
    "optimizer=sgd,adamw",
    "optimizer.weight_decay=tag(log,interval(1e-6,1e-1))",
)
REPEATS = 5


def sweep(scratch: Path, *words: str) -> float:
    """Run a sweep, and return its seconds."""
    start = time.perf_counter()
    line = [sys.executable, "-m", "runner", "-m", *words, f"output_root={scratch}"]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    if done.returncode not in (DONE, DIVERGED):  # a search tries learning rates that are too large
        raise RuntimeError(done.stderr[-2000:])
    return time.perf_counter() - start


def jobs() -> dict[str, Any]:
    """Return the seconds of sweeps of 8 and of 32 jobs, with jobs in parallel and with one job at a time.

    The two kinds of sweep alternate. The result contains each measurement, the medians, and the ratio of the medians.
    """
    found: dict[str, Any] = {}
    for count, repeats in ((8, REPEATS), (32, 3)):
        seconds: dict[str, list[float]] = {"at once": [], "one at a time": []}
        for _ in range(repeats):
            for name, slots in (("at once", "auto"), ("one at a time", "1")):
                with tempfile.TemporaryDirectory() as scratch:
                    seeds = ",".join(map(str, range(count)))
                    seconds[name].append(sweep(Path(scratch), *JOB, f"seed={seeds}", f"sweep.slots={slots}"))
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        found[f"{count} jobs"] = {
            **{
                name: {"median_s": round(medians[name], 2), "all": [round(each, 2) for each in seconds[name]]}
                for name in seconds
            },
            "ratio": round(medians["at once"] / medians["one at a time"], 3),
        }
        print(count, found[f"{count} jobs"], flush=True)
    return found


class _Instant(Pool):
    """A pool without processes, whose jobs have ended by the next call of `wait`."""

    def __init__(self) -> None:
        self._started: list[int] = []

    def submit(self, job: Job) -> str | None:
        if len(self._started) == 2:
            return None
        self._started.append(job.number)
        return "nowhere"

    def wait(self, seconds: float) -> list[Ended]:
        ended, self._started = self._started, []
        return [Ended(number, 0) for number in ended]

    def stop(self, numbers: list[int]) -> None: ...

    def kill(self) -> None: ...


class _Many(JobSource):
    def __init__(self, path: Path, count: int):
        self._path, self._count, self._next = path, count, 0

    def __len__(self) -> int:
        return self._count

    def next(self) -> Job | None:
        number, self._next = self._next, self._next + 1
        words = [f"seed={number}", "optimizer.lr=0.1", "model=resnet18"]
        if number >= self._count:
            return None
        directory = self._path / f"{number:03d}"
        return Job(number, words, console_file(self._path, number), overrides=words, directory=directory)


def overhead() -> dict[str, Any]:
    """Return the cost of a job, and of the scheduler."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sweep(Path(scratch), *JOB, f"seed={','.join(map(str, range(12)))}", "sweep.slots=1", "hydra.verbose=false")
        [path] = Path(scratch, "sweeps", "classifier").iterdir()
        entries = [entry for _, entry in sorted(read_ledger(path)["jobs"].items(), key=lambda item: int(item[0]))]
        trained = [read_result(path / entry["directory"])["seconds"] for entry in entries]
        gaps = [entry["seconds"] - seconds for entry, seconds in zip(entries, trained, strict=True)]
        starts = [late["started"] - early["started"] - early["seconds"] for early, late in itertools.pairwise(entries)]
        found["seconds of a job without its training"] = round(statistics.median(gaps), 3)
        found["seconds from the end of a job to the start of the next"] = round(statistics.median(starts), 3)
    with tempfile.TemporaryDirectory() as scratch, Ledger(["seed=…"], Path(scratch), "never") as ledger:
        print("1,000 jobs", file=sys.stderr)
        before, writes = _memory(), []
        update = ledger.update

        def timed(*arguments: Any, **changes: Any) -> None:
            start = time.perf_counter()
            update(*arguments, **changes)
            writes.append(time.perf_counter() - start)

        ledger.update = timed  # type: ignore[method-assign]
        start = time.process_time()
        with open(os.devnull, "w") as nowhere:
            sys.stderr, kept = nowhere, sys.stderr
            try:
                display = Display(1000, ["seed"], Console(file=nowhere))
                Scheduler(_Many(ledger.path, 1000), _Instant(), ledger, Local(), display).run(StopRequest())
            finally:
                sys.stderr = kept
        found["CPU seconds of the scheduler for 1,000 jobs"] = round(time.process_time() - start, 2)
        found["MB of the scheduler for 1,000 jobs"] = round(_memory() - before, 1)
        found["ms of a ledger update, median of the last 100"] = round(1e3 * statistics.median(writes[-100:]), 2)
    print(found, flush=True)
    return found


def enumerate_many() -> dict[str, Any]:
    """Return the median seconds until the first job starts in a sweep of 10,000 combinations.

    Half of the combinations are refused.
    """
    seconds = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as scratch:
            words = [
                *JOB,
                "optimizer=sgd,adam",
                "optimizer.momentum=0.9",
                "seed=range(0,5000)",
                f"output_root={scratch}",
            ]
            line = [sys.executable, "-m", "runner", "-m", *words, "sweep.on_failure=continue", "sweep.slots=1"]
            start = time.perf_counter()
            process = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            assert process.stderr is not None
            for text in process.stderr:
                if "started on" in text:
                    break
            seconds.append(time.perf_counter() - start)
            process.send_signal(signal.SIGTERM)
            process.communicate()
    found = {"seconds to the first job of 10,000": round(statistics.median(seconds), 2)}
    print(found, flush=True)
    return found


def study(path: Path) -> list[tuple[dict[str, Any], float | None]]:
    """Return the parameters and the value of each trial of the search at `path`."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    storage = JournalStorage(JournalFileBackend(str(path / "study.log")))
    trials = optuna.load_study(study_name="sweep", storage=storage).get_trials(deepcopy=False)
    return [(trial.params, trial.value) for trial in trials]


def search() -> dict[str, Any]:
    """Return the best accuracy that each sampler finds, for five seeds of the sampler."""
    best: dict[str, list[float]] = {"tpe": [], "random": []}
    for seed in range(REPEATS):
        for sampler, found in best.items():
            with tempfile.TemporaryDirectory() as scratch:
                options = ["model=tiny", "data=digits", "epochs=2", "device=cpu", "save_every=0", "keep=0"]
                sweep(
                    Path(scratch),
                    *options,
                    *SEARCH,
                    f"sweep.search={sampler}",
                    "sweep.trials=30",
                    f"sweep.sampler_seed={seed}",
                )
                [path] = Path(scratch, "sweeps", "classifier").iterdir()
                found.append(max(value for _, value in study(path) if value is not None))
            print(seed, sampler, round(found[-1], 4), flush=True)
    return {
        name: {"median": statistics.median(found), "all": [round(each, 4) for each in found]}
        for name, found in best.items()
    }


def kills() -> dict[str, Any]:
    """Compare a search that is killed and resumed up to 20 times with a search that is not killed.

    The result contains the number of kills, whether both searches have the same trials (`equal`), and the numbers of
    trials and of completed jobs in the search that is killed.
    """
    options = [*JOB[:4], "save_every=5", *SEARCH, "sweep.search=tpe", "sweep.trials=15", "sweep.slots=1", "resume=auto"]
    rng, num_killed = random.Random(0), 0
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        seconds = sweep(Path(one), *options)
        line = [sys.executable, "-m", "runner", "-m", *options, f"output_root={other}"]
        while True:
            process = subprocess.Popen(line, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            try:
                process.wait(None if num_killed == 20 else rng.uniform(3, 3 + 2 * seconds / 20))
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                num_killed += 1
        [undisturbed], [killed] = (list(Path(root, "sweeps", "classifier").iterdir()) for root in (one, other))
        ledger = read_ledger(killed)["jobs"]
        found = {
            "kills": num_killed,
            "trials": len(study(killed)),
            "equal": study(killed) == study(undisturbed),
            "jobs that are done": sum(entry["state"] == "done" for entry in ledger.values()),
        }
    print(found, flush=True)
    return found


def _memory() -> float:
    """Return the resident memory of this process in MB."""
    import psutil

    return psutil.Process().memory_info().rss / 1e6


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "jobs": jobs,
    "overhead": overhead,
    "enumerate": enumerate_many,
    "search": search,
    "kills": kills,
}


def main() -> None:
    """Run the parts that the command line names, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts; none: all")
    parts = parser.parse_args().parts or list(PARTS)
    found = {name: PARTS[name]() for name in parts}
    print(json.dumps(found, indent=2))
    tables = [{"title": name, **part} for name, part in found.items()]
    write("sweep", tables, f"python -m benchmarks.sweep {' '.join(parts)}")


if __name__ == "__main__":
    main()
