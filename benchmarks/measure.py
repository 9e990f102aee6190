"""Interleaved repeats in fresh processes, medians, and a table with the hardware beside it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.system.environment import environment

RESULTS = Path(__file__).parent / "results"


class Rates(dict[str, list[float]]):
    """The rates of each contender, round by round; `beside` has what else it told: {what: {contender: values}}."""

    def __init__(self, contenders: Sequence[str]):
        super().__init__((name, []) for name in contenders)
        self.beside: dict[str, dict[str, list[float]]] = {}


def interleave(module: str, contenders: Sequence[str], repeats: int, arguments: Sequence[str] = ()) -> Rates:
    """Run `python -m module --run CONTENDER` for every contender, `repeats` times round.

    A machine's speed drifts: contenders that take turns drift alike. Each prints its rate as its last line, and before
    it what `tell` prints.
    """
    rates = Rates(contenders)
    for repeat in range(repeats):
        for name in contenders:
            command = [sys.executable, "-m", module, "--run", name, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
            *lines, last = done.stdout.splitlines()
            rates[name].append(float(last))
            for what, value in (line.removeprefix(_TOLD).rsplit(" ", 1) for line in lines if line.startswith(_TOLD)):
                rates.beside.setdefault(what, {}).setdefault(name, []).append(float(value))
            print(f"  {repeat + 1}/{repeats} {name:<12} {rates[name][-1]:10.2f}", file=sys.stderr, flush=True)
    return rates


_TOLD = "beside: "


def tell(what: str, value: float) -> None:
    """Let `interleave`, which runs this process, note a value beside the rate."""
    print(f"{_TOLD}{what} {value}")


@contextmanager
def command(options: Sequence[str]) -> Iterator[Path]:
    """The directory of the run of `python -m runner OPTIONS`, one thread a process; it goes with the context."""
    with tempfile.TemporaryDirectory() as scratch:
        line = [sys.executable, "-m", "runner", *options, f"output_root={scratch}", "name=bench"]
        subprocess.run(line, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        (directory,) = Path(scratch, "bench").iterdir()
        yield directory


def result(directory: Path) -> dict[str, Any]:
    """What a run left as its result."""
    return json.loads((directory / "result.json").read_text(encoding="utf-8"))


def points(directory: Path, tag: str) -> list[tuple[float, float]]:
    """A curve of a run: when each point was logged, in seconds since the epoch, and its value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return [(p.wall_time, p.value) for p in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def ratios(rates: dict[str, list[float]], name: str, other: str) -> dict[str, float]:
    """How `name` compares with `other`: the median of the ratios round by round, and their range."""
    each = [a / b for a, b in zip(rates[name], rates[other], strict=True)]
    return {"median": statistics.median(each), "least": min(each), "most": max(each)}


def report(title: str, unit: str, rates: Rates, goals: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Print a table, and return it as plain values; `goals` are the least ratios wanted, by (name, other)."""
    print(f"\n{title}: {unit}, {len(next(iter(rates.values())))} interleaved repeats")
    for name, values in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        told = [f"{what} {statistics.median(each[name]):.3g}" for what, each in rates.beside.items() if name in each]
        spread = f"{min(values):10.2f} – {max(values):.2f}"
        print(f"  {name:<24} median {statistics.median(values):10.2f}   {spread}", *told, sep="   ")
    compared = []
    for (name, other), goal in goals.items():
        ratio = ratios(rates, name, other)
        spread = f"{ratio['median']:.3f} ({ratio['least']:.3f} – {ratio['most']:.3f})"
        verdict = "reached" if ratio["median"] >= goal else "MISSED"
        print(f"  {name} / {other}: {spread}, goal {goal}: {verdict}")
        compared.append({"name": name, "other": other, "goal": goal, **ratio})
    return {"title": title, "unit": unit, "rates": rates, "ratios": compared, "beside": rates.beside}


def write(name: str, tables: list[dict[str, Any]], command: str) -> Path:
    """Leave the tables under `results/`, with date, hardware, versions and command."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "machine": platform.machine(),
        "environment": environment(),
        "tables": tables,
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to benchmarks/results/{path.name}")
    return path
