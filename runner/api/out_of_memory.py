"""What a run that has run out of memory needs according to its plan, and changes with which it would need less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.api.composing import compose
from runner.config.overrides import replaced
from runner.planning.fake_step import prepared, trace_ranks
from runner.planning.report import remedies
from runner.run import Run, build_run
from runner.system.accelerator import total_bytes
from runner.system.memory import host_memory
from runner.system.tables import size

_SAVED = 0.1
"""The least part of the memory that a change must save, as a plan counts tensors only."""


def advice(run: Run, overrides: Sequence[str]) -> Iterator[str]:
    """Yield lines: the memory that the plan of `run` counts, by kind, and the three cheapest changes that need less.

    `overrides` are those of the run, to which the changes are added.
    """
    session = prepared(run)
    device, ranks = session.device, trace_ranks(run, session)
    rank = max(ranks, key=lambda rank: rank.peak_bytes)
    on_host = device.type == "cpu"
    room = host_memory()["total_bytes"] or 0 if on_host else total_bytes(device)
    needed = sum(each.peak_bytes for each in ranks) if on_host else rank.peak_bytes
    where = "this machine has" if on_host else f"{device} has"
    kinds = ", ".join(f"{kind} {size(count)}" for kind, count in rank.peak.items() if count)
    yield f"tensors need {size(needed)} according to the plan, and {where} {size(room)}; rank {rank.rank}: {kinds}"

    def changed(words: Sequence[str]) -> Run:
        return build_run(dict(compose(replaced(overrides, *words))))

    limit = (1 - _SAVED) * min(rank.peak_bytes, room / (len(ranks) if on_host else 1))
    for each in remedies(run, changed, max(session.world_size, len(session.devices)), limit):
        yield f"needs {size(each['peak_bytes'])} per process: {' '.join(each['overrides'])} ({each['costs']})"
