"""Interleaved repeats in fresh processes, medians, and a table with the hardware beside it."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.environment import environment

RESULTS = Path(__file__).parent / "results"


def interleave(
    module: str, contenders: Sequence[str], repeats: int, arguments: Sequence[str] = ()
) -> dict[str, list[float]]:
    """Run `python -m module --run CONTENDER` for every contender, `repeats` times round.

    A machine's speed drifts: contenders that take turns drift alike. Each prints its rate as its last line.
    """
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name in contenders:
            command = [sys.executable, "-m", module, "--run", name, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
            rates[name].append(float(done.stdout.split()[-1]))
            print(f"  {repeat + 1}/{repeats} {name:<12} {rates[name][-1]:10.2f}", file=sys.stderr, flush=True)
    return rates


def ratios(rates: dict[str, list[float]], name: str, other: str) -> dict[str, float]:
    """How `name` compares with `other`: the median of the ratios round by round, and their range."""
    each = [a / b for a, b in zip(rates[name], rates[other], strict=True)]
    return {"median": statistics.median(each), "least": min(each), "most": max(each)}


def report(title: str, unit: str, rates: dict[str, list[float]], goals: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Print a table, and return it as plain values; `goals` are the least ratios wanted, by (name, other)."""
    print(f"\n{title}: {unit}, {len(next(iter(rates.values())))} interleaved repeats")
    for name, values in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        print(f"  {name:<12} median {statistics.median(values):10.2f}   {min(values):10.2f} – {max(values):.2f}")
    compared = []
    for (name, other), goal in goals.items():
        ratio = ratios(rates, name, other)
        spread = f"{ratio['median']:.3f} ({ratio['least']:.3f} – {ratio['most']:.3f})"
        verdict = "reached" if ratio["median"] >= goal else "MISSED"
        print(f"  {name} / {other}: {spread}, goal {goal}: {verdict}")
        compared.append({"name": name, "other": other, "goal": goal, **ratio})
    return {"title": title, "unit": unit, "rates": rates, "ratios": compared}


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
