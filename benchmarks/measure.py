"""Runs contenders alternately in new processes, and reports medians together with the hardware."""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runner.system.provenance import environment

RESULTS = Path(__file__).parent / "results"
Contenders = Mapping[str, Callable[..., float]]


class Rates(dict[str, list[float]]):
    """A dict from the name of each contender to its rates, one per round.

    The attribute `beside` has the other values that the contenders print: a dict from the name of a value to a dict
    from the name of each contender to its values, one per round.
    """

    def __init__(self, contenders: Sequence[str]):
        super().__init__((name, []) for name in contenders)
        self.beside: dict[str, dict[str, list[float]]] = {}


def parser(description: str | None, contenders: Contenders, repeats: int, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser of `--repeats`, of `--run CONTENDER`, and of an option for each of `numbers` with its default."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"repeats": repeats, **numbers}.items():
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--run", choices=contenders, help="measure this contender once, in this process")
    return made


def passed(arguments: argparse.Namespace, *left_out: str) -> list[str]:
    """Return the options as words of a command line, except `--run` and those in `left_out`."""
    given = {name: value for name, value in vars(arguments).items() if name not in ("run", *left_out)}
    switches = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is True]
    return [f"--{name}={value}" for name, value in given.items() if not isinstance(value, bool | None)] + switches


def measured(name: str, contenders: Contenders, arguments: argparse.Namespace, *values: Any) -> Rates:
    """Measure the contenders of the benchmark `name`; with `--run`, print the rate of one and exit.

    Each contender is a function of `values`.
    """
    if arguments.run:
        print(contenders[arguments.run](*values))
        sys.exit()
    return interleave(f"benchmarks.{name}", list(contenders), arguments.repeats, passed(arguments, "repeats"))


def interleave(module: str, contenders: Sequence[str], repeats: int, arguments: Sequence[str] = ()) -> Rates:
    """Run `python -m module --run CONTENDER ARGUMENTS` for every contender, for `repeats` rounds.

    Alternating the contenders makes a drift of the machine's speed affect all of them alike. The last line that a
    contender prints is its rate; `print_value` prints other values before it. An argument `--seed=` gets the number of
    the round.
    """
    rates = Rates(contenders)
    for repeat in range(repeats):
        for name in contenders:
            words = [f"{word}{repeat}" if word == "--seed=" else word for word in arguments]
            command = [sys.executable, "-m", module, "--run", name, *words]
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


def runner(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "runner", *words], capture_output=True, text=True)


@contextmanager
def command(options: Sequence[str]) -> Iterator[Path]:
    """Run `python -m runner OPTIONS` on the CPU, with one thread per process and without evaluations in between.

    Yields:
        The run directory, which is temporary.
    """
    with tempfile.TemporaryDirectory() as scratch:
        line = [sys.executable, "-m", "runner", "eval_every=0", "save_every=0", "keep=0", "device=cpu"]
        line += ["device.threads=1", *options, f"output_root={scratch}", "name=bench"]
        subprocess.run(line, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        (directory,) = Path(scratch, "bench").iterdir()
        yield directory


def in_two_processes(rank_main: Callable[..., list[float]], *values: Any) -> list[float]:
    """Call `rank_main(rank, *values)` in two processes of one thread each; returns what rank 0 returned."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "seconds.json")
        torch.multiprocessing.spawn(_rank, (rank_main, values, path), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
        return json.loads(path.read_text())


def _rank(rank: int, rank_main: Callable[..., list[float]], values: Sequence[Any], path: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=2)
    seconds = rank_main(rank, *values)
    if rank == 0:
        path.write_text(json.dumps(seconds))
    torch.distributed.destroy_process_group()


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
    """Print a table, and return it as plain values; `goals` has the minimum ratio of two contenders, by their names."""
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


def write(name: str, tables: list[dict[str, Any]], words: Sequence[str] = (), variant: str = "") -> None:
    """Write the tables of the benchmark `name` to `results/`, with date, hardware, versions and command."""
    path = RESULTS / f"{name}{variant}.json"
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *words]),
        "machine": platform.machine(),
        "environment": environment(),
        "tables": tables,
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to benchmarks/results/{path.name}")
