"""Fixtures of the fault-injection tests.

`make test` runs a fixed selection; `make faults` (RUNNER_FAULTS=all) runs everything, with faults at random times drawn
from RUNNER_FAULTS_SEED, which a test that fails prints. See tests/helpers/faults.py and tests/helpers/fault_checks.py.
"""

import os
import random
from collections.abc import Callable

import pytest
from helpers.faults import NONDETERMINISTIC_RUNS, RUN_ALL_FAULTS, FaultTrial, ReferenceRun, train_without_faults

# In the environment, for the processes of pytest-xdist.
SEED = os.environ.setdefault("RUNNER_FAULTS_SEED", str(random.randrange(10**6) if RUN_ALL_FAULTS else 0))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Return a random generator, which depends only on RUNNER_FAULTS_SEED and this test, not on other tests."""
    print(f"RUNNER_FAULTS=all RUNNER_FAULTS_SEED={SEED} draws the same moments")
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Callable[[str], ReferenceRun]:
    """Return a function that trains a run of `helpers.faults.RUNS` without faults, once."""
    done: dict[str, ReferenceRun] = {}

    def get(run: str) -> ReferenceRun:
        if run not in done:
            done[run] = train_without_faults(tmp_path_factory.mktemp(run.replace(" ", "_")), run)
        return done[run]

    return get


@pytest.fixture
def trial(tmp_path, reference: Callable[[str], ReferenceRun]) -> Callable[..., FaultTrial]:
    """Return a function that prepares a trial of a run; further arguments are overrides."""

    def prepare(run: str, *extra: str, number: int = 0) -> FaultTrial:
        compared = None if run in NONDETERMINISTIC_RUNS else reference(run)
        return FaultTrial(tmp_path / str(number), run, compared, extra)

    return prepare
