"""The CPU time of each operation of an update of the agent, in microseconds, with CleanRL's settings.

`python -m benchmarks.dqn_costs [--steps 50000] [--repeats 5]`. Each operation is timed in runs of `benchmarks.dqn`
with ten and with fifty environments, by the CPU clock of the training thread. Other programs on the machine affect CPU
time less than wall-clock time. If an operation calls another operation in the table, the time of the caller does not
include the time of the called operation. The time of an update includes the time of ten environment steps.

The table `by itself` has the times of three of the operations in isolation: they are called repeatedly on one batch or
in one set of environments, so that their code and data stay in the processor's caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch.nn.functional import mse_loss

from benchmarks import dqn
from benchmarks.measure import write
from models.qnet import QNet, WithTarget
from runner import training
from runner.env.vector import Vector
from runner.precision import Precision
from runner.workloads.dqn import actor, n_step, replay
from runner.workloads.dqn.workload import DQN

WARM_UP = 10_000
"""Environment steps without updates, in `benchmarks.dqn`."""
NUM_ENVS = (10, 50)
"""Numbers of environments, for one run each."""

OPERATIONS: dict[str, tuple[Any, str]] = {
    "gymnasium: step the environments": (CartPoleVectorEnv, "step"),
    "environments: checks and bookkeeping": (Vector, "step"),
    "exploration, episodes, possible returns": (actor.Actor, "step"),
    "replay: n-step buffer": (n_step.NStepBuffer, "push"),
    "replay: write transitions": (replay.Replay, "add"),
    "replay: draw and gather 128 transitions": (actor.Actor, "sample"),
    "replay: split into fields": (replay, "unpack"),
    "loss": (DQN, "loss"),
    "forward pass of both networks": (WithTarget, "forward"),
    "backward pass": (Precision, "backward"),
    "Adam": (Precision, "step"),
    "target network": (DQN, "after_step"),
    "logs (one in 100 updates)": (training, "log_training"),
    "checkpoints (20 in all)": (training.State, "save"),
    "the rest of the loop": (training, "loop"),
}
ACTING, EVALUATION = "acting: forward pass of the observations", "the final evaluation, which is not part of an update"


class Clock:
    """Measures the CPU seconds of each operation, by name.

    The seconds of an operation do not include the seconds of the timed operations that it calls, unless the operation
    is timed with `whole=True`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        """A stack: for each running operation, the seconds of the operations that it has called."""
        self._whole = False

    def timed(self, name: str, function: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
        """Return a function that calls `function`, and adds the CPU time of the call to the operation `name`.

        If `whole` is True, the timed operations that `function` calls are not timed separately. Their time is part of
        the time of `name`.
        """

        def wrapper(*arguments: Any, **options: Any) -> Any:
            if self._whole:
                return function(*arguments, **options)
            self._inner.append(0.0)
            self._whole = whole
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                spent = time.thread_time() - began
                self._whole = False
                self.seconds[name] += spent - self._inner.pop()
                self._inner[-1] += spent

        return wrapper


def in_the_run(steps: int, num_envs: int) -> dict[str, float]:
    """Return the microseconds of each operation per update, in one run of `steps` environment steps."""
    clock, greedy_policy = Clock(), actor.greedy_policy

    def timed_policy(*arguments: Any) -> actor.Policy:
        return clock.timed(ACTING, greedy_policy(*arguments), whole=True)

    evaluate = clock.timed(EVALUATION, training.evaluate, whole=True)
    with ExitStack() as stack:
        stack.enter_context(patch.object(actor, "greedy_policy", timed_policy))
        stack.enter_context(patch.object(training, "evaluate", evaluate))
        for name, (owner, attribute) in OPERATIONS.items():
            stack.enter_context(patch.object(owner, attribute, clock.timed(name, getattr(owner, attribute))))
        dqn.with_runner(steps, num_envs=num_envs)
    updates = (steps - WARM_UP) // 10
    # The warm-up has environment steps, but no updates.
    tens = dict.fromkeys(list(OPERATIONS)[:5], steps // 10)
    return {name: clock.seconds[name] / tens.get(name, updates) * 1e6 for name in (ACTING, *OPERATIONS)}


def by_itself(count: int = 2000) -> dict[str, float]:
    """Return the microseconds of three of the operations, each repeated by itself."""
    envs, model = CartPoleVectorEnv(10), WithTarget(QNet(4, 2, [120, 84]))
    observations, _ = envs.reset(seed=0)
    optimizer = torch.optim.Adam(model.online.parameters(), 2.5e-4, fused=True)
    batch = [torch.randn(128, 4), torch.randn(128, 4)]
    actions, returns = torch.randint(2, (128, 1)), torch.rand(128, 1)

    def update() -> None:
        values, following = model(*batch, double=False)
        mse_loss(values.gather(1, actions), returns + 0.99 * following).backward()
        optimizer.step()
        optimizer.zero_grad()

    policy = actor.greedy_policy(model, torch.device("cpu"))
    operations: dict[str, Callable[[], object]] = {
        "step ten environments": lambda: envs.step(np.ones(10, np.int64)),
        "forward pass of ten observations": lambda: policy(observations),
        "forward pass, loss, backward pass, Adam": update,
    }
    found = {}
    for name, operation in operations.items():
        for _ in range(count // 10):
            operation()
        began = time.thread_time()
        for _ in range(count):
            operation()
        found[name] = (time.thread_time() - began) / count * 1e6
    return found


def main() -> None:
    """Measure all operations, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 1000 or arguments.repeats < 1:
        parser.error(f"--steps: at least {WARM_UP + 1000}, and --repeats: at least 1")
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(arguments.repeats):
        for num_envs in NUM_ENVS:
            for name, microseconds in in_the_run(arguments.steps, num_envs).items():
                found[f"{num_envs} environments"][name].append(microseconds)
        for name, microseconds in by_itself().items():
            found["by itself"][name].append(microseconds)
    tables = []
    for title, operations in found.items():
        print(title)
        for name, values in operations.items():
            print(f"  {name:<52} {statistics.median(values):6.1f} µs ({min(values):.1f} – {max(values):.1f})")
        rows = [
            {"operation": name, "microseconds": statistics.median(values), "all": values}
            for name, values in operations.items()
        ]
        if title != "by itself":
            print(f"  an update and ten environment steps take {sum(row['microseconds'] for row in rows):.0f} µs")
        tables.append({"title": f"what an update of the agent costs: {title}", "unit": "µs", "rows": rows})
    line = f"python -m benchmarks.dqn_costs --steps {arguments.steps} --repeats {arguments.repeats}"
    write("dqn_costs", tables, line)


if __name__ == "__main__":
    main()
