"""Runs contenders alternately in new processes, and reports medians together with the hardware."""

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

from runner.system.provenance import environment

RESULTS = Path(__file__).parent / "results"


class Rates(dict[str, list[float]]):
    """A dict from the name of each contender to its rates, one per round.

    The attribute `beside` has the other values that the contenders print: a dict from the name of a value to a dict
    from the name of each contender to its values, one per round.
    """

    def __init__(self, contenders: Sequence[str]):
        super().__init__((name, []) for name in contenders)
        self.beside: dict[str, dict[str, list[float]]] = {}


def interleave(module: str, contenders: Sequence[str], repeats: int, arguments: Sequence[str] = ()) -> Rates:
    """Run `python -m module --run CONTENDER` for every contender, for `repeats` rounds.

    Alternating the contenders makes a drift of the machine's speed affect all of them alike. The last line that a
    contender prints is its rate; `print_value` prints other values before it.

    Args:
        module: the benchmark.
        contenders: the names of the contenders.
        repeats: the number of rounds.
        arguments: further arguments of the benchmark.
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
            values = (line.removeprefix(_PREFIX).rsplit(" ", 1) for line in lines if line.startswith(_PREFIX))
            for what, value in values:
                rates.beside.setdefault(what, {}).setdefault(name, []).append(float(value))
            print(f"  {repeat + 1}/{repeats} {name:<12} {rates[name][-1]:10.2f}", file=sys.stderr, flush=True)
    return rates


_PREFIX = "beside: "


def print_value(what: str, value: float) -> None:
    """Print `value` in the format in which `interleave` reads all values other than the rate."""
    print(f"{_PREFIX}{what} {value}")


@contextmanager
def command(options: Sequence[str]) -> Iterator[Path]:
    """Run `python -m runner OPTIONS` with one thread per process; yields its run directory, which is temporary."""
    with tempfile.TemporaryDirectory() as scratch:
        line = [sys.executable, "-m", "runner", *options, f"output_root={scratch}", "name=bench"]
        subprocess.run(line, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        (directory,) = Path(scratch, "bench").iterdir()
        yield directory


def result(directory: Path) -> dict[str, Any]:
    """Return the result of a run."""
    return json.loads((directory / "result.json").read_text(encoding="utf-8"))


def points(directory: Path, tag: str) -> list[tuple[float, float]]:
    """Return a curve of a run as pairs of time, in seconds since the epoch, and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return [(p.wall_time, p.value) for p in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def ratios(rates: dict[str, list[float]], name: str, other: str) -> dict[str, float]:
    """Return the median, minimum and maximum over all rounds of the rate of `name` divided by the rate of `other`."""
    per_round = [a / b for a, b in zip(rates[name], rates[other], strict=True)]
    return {"median": statistics.median(per_round), "least": min(per_round), "most": max(per_round)}


def report(title: str, unit: str, rates: Rates, goals: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Print a table, and return it as plain values.

    Args:
        title: the title of the table.
        unit: the unit of the rates.
        rates: the rates of each contender.
        goals: the minimum ratio of two contenders, by (name, other).
    """
    print(f"\n{title}: {unit}, {len(next(iter(rates.values())))} interleaved repeats")
    for name, values in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        others = [f"{what} {statistics.median(each[name]):.3g}" for what, each in rates.beside.items() if name in each]
        spread = f"{min(values):10.2f} – {max(values):.2f}"
        print(f"  {name:<24} median {statistics.median(values):10.2f}   {spread}", *others, sep="   ")
    compared = []
    for (name, other), goal in goals.items():
        ratio = ratios(rates, name, other)
        spread = f"{ratio['median']:.3f} ({ratio['least']:.3f} – {ratio['most']:.3f})"
        verdict = "reached" if ratio["median"] >= goal else "MISSED"
        print(f"  {name} / {other}: {spread}, goal {goal}: {verdict}")
        compared.append({"name": name, "other": other, "goal": goal, **ratio})
    return {"title": title, "unit": unit, "rates": rates, "ratios": compared, "beside": rates.beside}


def write(name: str, tables: list[dict[str, Any]], command: str) -> Path:
    """Write the tables to `results/`, with date, hardware, versions and command; returns the path."""
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
