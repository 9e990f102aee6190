"""The times of a pipeline's computations under each schedule, given how long its stages take."""

from __future__ import annotations

from collections.abc import Callable

from runner.parallel.pipelining.timeline import Span
from runner.system.torch_private import pipeline_actions

Action = tuple[int, str, int]
"""A computation: the stage; `forward`, `backward` or `weights`, as in a `Span`; and the micro-batch."""

_SPLIT = "zero_bubble"
"""The schedule that computes the gradients of weights separately from those of activations."""


def actions(schedule: str, num_stages: int, num_workers: int, num_micros: int) -> list[list[Action]]:
    """Return the computations of each worker, in their order.

    Args:
        schedule: key of `runner.parallel.pipelining.process_engine.SCHEDULE_CLASSES`.
        num_stages: number of stages; stage i is on worker i modulo `num_workers`.
        num_workers: number of workers.
        num_micros: number of micro-batches.
    """
    micros = range(num_micros)
    if schedule == "gpipe":
        return [[(stage, kind, m) for kind in ("forward", "backward") for m in micros] for stage in range(num_stages)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(stage, num_stages, num_micros) for stage in range(num_stages)]
    from runner.parallel.pipelining.process_engine import SCHEDULE_CLASSES  # imported here: it takes half a second

    kinds = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
    order = pipeline_actions(SCHEDULE_CLASSES[schedule], num_stages, num_workers, num_micros)
    return [[(stage, kinds[kind], micro) for stage, kind, micro in own] for own in order]


def _one_forward_one_backward(stage: int, num_stages: int, num_micros: int) -> list[Action]:
    """Return the order of a stage: its forward passes until the first gradient can come, then one of each in turn.

    torch's own list for this schedule, `Schedule1F1B.pipeline_order`, is wrong for the last stages of torch 2.14.
    """
    ahead = min(num_micros, num_stages - stage)
    own = [(stage, "forward", micro) for micro in range(ahead)]
    for micro in range(num_micros):
        own.append((stage, "backward", micro))
        if micro + ahead < num_micros:
            own.append((stage, "forward", micro + ahead))
    return own


def simulate(
    schedule: str, num_stages: int, num_workers: int, num_micros: int, seconds: Callable[[int, str], float]
) -> list[Span]:
    """Return all computations of a step, each as early as possible; messages between stages take no time.

    Args:
        schedule, num_stages, num_workers, num_micros: as in `actions`.
        seconds: function that returns the time of a computation of a stage, given the stage and its kind. Under
            `zero_bubble`, the kinds are `forward`, `backward` (the gradients of activations only) and `weights`.
    """
    orders = [list(reversed(own)) for own in actions(schedule, num_stages, num_workers, num_micros)]
    ends: dict[Action, float] = {}
    free, spans = [0.0] * len(orders), []
    while any(orders):
        ready = [worker for worker, own in enumerate(orders) if own and _is_ready(own[-1], num_stages, ends)]
        assert ready, f"{schedule} waits for itself"
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
    """Return the computation whose result `action` needs, besides those of its own worker; None if there is none."""
    stage, kind, micro = action
    if kind == "forward":
        return (stage - 1, "forward", micro) if stage else None
    if kind == "weights":
        return stage, "backward", micro
    return (stage, "forward", micro) if stage == num_stages - 1 else (stage + 1, "backward", micro)
