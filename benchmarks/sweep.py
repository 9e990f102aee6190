"""Benchmarks of sweeps: their duration, the time to their first job, and what a search finds.

`python -m benchmarks.sweep [PART …]` runs the named parts, or all parts if none is named. The jobs train on the CPU.

- `jobs`: the duration of sweeps of 8 and of 32 jobs that each train for half a second. Each sweep is run in two ways:
  with as many jobs at once as the CPU cores allow, and with one job at a time.
- `stack`: the duration of sweeps of 16 seeds, each run by itself, and together in stacks (`sweep.stack`).
- `enumerate`: the time until the first job starts in a sweep of 10,000 combinations, half of which are refused.
- `search`: the best accuracy of 30 trials of 2 epochs on the digits, with TPE and with random search, for five seeds of
  the sampler.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import runner, write
from runner.system.console import DIVERGED, DONE

JOB = ("model=tiny", "data=digits", "epochs=1", "device=cpu", "eval_every=0", "save_every=0")
"""A job that trains for about half a second."""

SEARCH = (
    "optimizer.lr=tag(log,interval(1e-4,1))",
    "optimizer=sgd,adamw",
    "optimizer.weight_decay=tag(log,interval(1e-6,1e-1))",
)
STACKED = {
    "layers": (
        "model=qnet",
        "data.size=8",
        "optimizer=adamw",
        "optimizer.lr=0.001",
        "steps=1500",
        "eval_every=500",
        "save_every=0",
    ),
    "convolutions": ("model=tiny", "data.size=8", "epochs=5", "save_every=0"),
    "agents": (
        *(
            "workload=dqn",
            "workload.env_steps=8000",
            "workload.eval_episodes=10",
            "save_every=0",
            "model.hidden=[120,84]",
            "optimizer.lr=2.5e-4",
            "schedule=constant",
        ),
        *("env.num_envs=10", "workload.replay_ratio=0.1", "workload.replay_size=10000", "workload.n_step=1"),
        *("workload.double=false", "workload.clip_targets=false", "workload.td_loss=mse", "workload.target_every=50"),
        *("workload.target_tau=1", "workload.epsilon_fraction=0.5", "workload.epsilon_final=0.05", "eval_every=0"),
    ),
}
"""A perceptron 64-128-128-10, two convolutions, and CleanRL's agent, with ten environments."""

REPEATS = 5


def sweep(scratch: Path, *words: str) -> float:
    """Run a sweep, and return its seconds."""
    start = time.perf_counter()
    done = runner("-m", *words, f"output_root={scratch}")
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
        rounded = {name: [round(each, 2) for each in measured] for name, measured in seconds.items()}
        found[f"{count} jobs"] = {name: {"median_s": round(medians[name], 2), "all": rounded[name]} for name in medians}
        found[f"{count} jobs"]["ratio"] = round(medians["at once"] / medians["one at a time"], 3)
        print(count, found[f"{count} jobs"], flush=True)
    return found


def stack() -> dict[str, Any]:
    """Return the seconds of sweeps of 16 seeds, with each way to compute them, which alternate."""
    found: dict[str, Any] = {}
    for task, words in STACKED.items():
        seconds: dict[str, list[float]] = {"1": [], "16": [], "auto": []}
        for _ in range(REPEATS):
            for size, measured in seconds.items():
                with tempfile.TemporaryDirectory() as scratch:
                    own = ("seed=range(0,16)", "device=cpu", f"sweep.stack={size}")
                    measured.append(round(sweep(Path(scratch), *words, *own), 2))
        ratios = {
            size: statistics.median(map(lambda a, b: a / b, measured, seconds["1"]))
            for size, measured in seconds.items()
        }
        found[task] = {"seconds": seconds, "ratio to sweep.stack=1": {n: round(each, 3) for n, each in ratios.items()}}
        print(task, found[task], flush=True)
    return found


def enumerate_many() -> dict[str, Any]:
    """Return the median seconds until the first job starts in a sweep of 10,000 combinations.

    Half of the combinations are refused.
    """
    seconds = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as scratch:
            words = [*JOB, "optimizer=sgd,adam", "optimizer.momentum=0.9", "seed=range(0,5000)", "sweep.slots=1"]
            line = [sys.executable, "-m", "runner", "-m", *words, f"output_root={scratch}"]
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
                options += [*SEARCH, f"sweep.search={sampler}", "sweep.trials=30", f"sweep.sampler_seed={seed}"]
                sweep(Path(scratch), *options)
                [path] = Path(scratch, "sweeps", "classifier").iterdir()
                found.append(max(value for _, value in study(path) if value is not None))
            print(seed, sampler, round(found[-1], 4), flush=True)
    return {
        name: {"median": statistics.median(found), "all": [round(each, 4) for each in found]}
        for name, found in best.items()
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "jobs": jobs,
    "stack": stack,
    "enumerate": enumerate_many,
    "search": search,
}


def main() -> None:
    """Run the parts that the command line names, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts; none: all")
    parts = parser.parse_args().parts or list(PARTS)
    found = {name: PARTS[name]() for name in parts}
    print(json.dumps(found, indent=2))
    tables = [{"title": name, **part} for name, part in found.items()]
    write("sweep", tables, parts)


if __name__ == "__main__":
    main()
