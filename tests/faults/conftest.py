"""Fixtures of the fault-injection tests, and a summary table of the injected faults.

`make test` runs a fixed selection; `make faults` (RUNNER_FAULTS=all) runs everything, with faults at random times drawn
from RUNNER_FAULTS_SEED, which is printed. See tests/helpers/faults.py and tests/helpers/fault_checks.py.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import (
    NONDETERMINISTIC_RUNS,
    RUN_ALL_FAULTS,
    FaultCounter,
    FaultTrial,
    ReferenceRun,
    train_without_faults,
)

SEED = int(os.environ.get("RUNNER_FAULTS_SEED") or (random.randrange(10**6) if RUN_ALL_FAULTS else 0))
TABLE = Path(__file__).parent.parent.parent / "outputs" / "faults.md"


def pytest_configure() -> None:
    os.environ["RUNNER_FAULTS_SEED"] = str(SEED)  # for the processes of pytest-xdist


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Return a random generator, which depends only on RUNNER_FAULTS_SEED and this test, not on other tests."""
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferenceRun]:
    """Return a function that trains a run of `helpers.faults.RUNS` without faults, once."""
    done: dict[str, ReferenceRun] = {}

    def get(run: str) -> ReferenceRun:
        if run not in done:
            done[run] = train_without_faults(tmp_path_factory.mktemp(run.replace(" ", "_")), run)
        return done[run]

    return get


@pytest.fixture
def count_fault(request: pytest.FixtureRequest) -> FaultCounter:
    """Return a context that counts one fault of a kind, which passes unless the block raises an error.

    The context yields a function; call it if the fault did not happen, so that it is not counted.
    """

    @contextmanager
    def count(kind: str) -> Iterator[Callable[[], None]]:
        entry, counted = [kind, False], request.node.user_properties
        counted.append(("fault", entry))
        yield lambda: counted.remove(("fault", entry))
        entry[1] = True

    return count


@pytest.fixture
def trial(
    tmp_path: Path, reference: Callable[[str], ReferenceRun], count_fault: FaultCounter
) -> Callable[..., FaultTrial]:
    """Return a function that prepares a trial of a run with faults of a kind; further arguments are overrides."""

    def prepare(run: str, kind: str, *extra: str, number: int = 0) -> FaultTrial:
        compared = None if run in NONDETERMINISTIC_RUNS else reference(run)
        return FaultTrial(tmp_path / str(number), run, compared, count_fault, kind, extra)

    return prepare


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many faults of each kind passed; a test that counts no faults is one, named after its file."""
    tried: dict[str, list[bool]] = defaultdict(list)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            path = Path(report.nodeid.partition("::")[0])
            if path.parent.name != "faults" or report.when != ("setup" if outcome == "error" else "call"):
                continue
            faults = [entry for name, entry in report.user_properties if name == "fault"]
            if outcome != "passed" and all(passed for _, passed in faults):  # a check after the last fault failed
                faults = [(kind, False) for kind, _ in faults]
            for kind, passed in faults or [(path.stem.removeprefix("test_").replace("_", " "), outcome == "passed")]:
                tried[kind].append(passed)
    if not tried:
        return
    lines = ["| fault | tried | passed |", "|---|---|---|"]
    lines += [f"| {kind} | {len(each)} | {sum(each)} |" for kind, each in sorted(tried.items())]
    terminalreporter.section("faults")
    terminalreporter.write_line(f"seed {SEED}: RUNNER_FAULTS=all RUNNER_FAULTS_SEED={SEED} draws the same moments")
    for line in lines:
        terminalreporter.write_line(line)
    if RUN_ALL_FAULTS:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join([f"Seed {SEED}.", "", *lines, ""]))
