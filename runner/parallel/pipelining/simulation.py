"""The times of a pipeline's computations under each schedule, given how long its stages take."""

from __future__ import annotations

from collections.abc import Callable

from runner.parallel.pipelining.schedules import Action, actions
from runner.parallel.pipelining.timeline import Span


def simulate(
    schedule: str, num_stages: int, num_workers: int, num_micros: int, seconds: Callable[[int, str], float]
) -> list[Span]:
    """Return all computations of a step, each of which starts as early as possible; messages take no time.

    Args:
        schedule, num_stages, num_workers, num_micros: as in `actions`.
        seconds: function that returns the time of a computation, given its stage and its kind: `forward` or `backward`.
            Under `zero_bubble`, `backward` computes only the gradients of activations, and there is a third kind,
            `weights`.
    """
    orders = [list(reversed(own)) for own in actions(schedule, num_stages, num_workers, num_micros)]
    ends: dict[Action, float] = {}
    free, spans = [0.0] * len(orders), []
    while any(orders):
        ready = [worker for worker, own in enumerate(orders) if own and _is_ready(own[-1], num_stages, ends)]
        assert ready, f"{schedule}: deadlock"
        for worker in ready:
            stage, kind, micro = action = orders[worker].pop()
            needs = _needs(action, num_stages)
            start = max(free[worker], ends[needs] if needs else 0.0)
            free[worker] = ends[action] = start + seconds(stage, kind)
            spans.append(Span(stage, kind, micro, start, ends[action]))
    return spans


def _is_ready(action: Action, num_stages: int, ends: dict[Action, float]) -> bool:
    needs = _needs(action, num_stages)
    return needs is None or needs in ends


def _needs(action: Action, num_stages: int) -> Action | None:
    """Return the computation that must end before `action` can start; None if there is none."""
    stage, kind, micro = action
    if kind == "forward":
        return (stage - 1, "forward", micro) if stage else None
    if kind == "weights":
        return stage, "backward", micro
    return (stage, "forward", micro) if stage == num_stages - 1 else (stage + 1, "backward", micro)
