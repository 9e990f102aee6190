"""The plan of a run as plain values: ranks, batch, memory, costs, checkpoints, and changes that make the run fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.analysis.saved_runs import find_runs
from runner.api.composing import compose
from runner.api.saved import load
from runner.commands.composed_run import compose_run, replaced
from runner.config.errors import ConfigError
from runner.planning.costs import Machine
from runner.planning.fake_step import trace
from runner.planning.measure import measure
from runner.planning.plan_remedies import changes
from runner.planning.planned_session import prepared
from runner.planning.report import measured, report_of
from runner.run import Run, build_run, check_used

_ENOUGH = 4
"""As soon as this many changes make the run fit, no more changes are tried."""


def plan(
    overrides: Sequence[str],
    config_dir: str | None = None,
    num_devices: int | None = None,
    memory: float | None = None,
    speeds: Sequence[float | None] | None = None,
    with_parts: bool = False,
    source: Path | None = None,
) -> dict[str, Any]:
    """Return the plan of a run as plain values.

    Args:
        overrides: the overrides of the config.
        config_dir: a directory with options of your own; None to use only conf/.
        num_devices: number of devices of the machine that is planned for; None to plan for the devices of this machine.
        memory: memory of each device in bytes; None to leave open whether the run fits.
        speeds: three numbers for a lower bound on the time of a step: the floating-point operations per second of a
            device, the bytes per second from or to its memory, and the bytes per second that it sends to another
            device. If the third number is None, messages between devices are assumed to take no time. If `speeds` is
            None, the bound is left out.
        with_parts: whether to measure the parts of a step on this machine, to predict the time of a step.
        source: the directory of a run whose config the overrides change; None to compose the config from conf/.

    Returns:
        The dict that `report_of` returns. If `memory` is given, the keys `memory_bytes` and `fits` are set; if the run
        does not fit, `remedies` is the list that the function `remedies` returns. With `source` and no overrides,
        `measured` has the measurements of the saved run.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if the config is refused, or `source` has no run.
        RankError: if a process that measures the parts of a step fails.
    """
    build = _builder(source, config_dir)
    run = build(overrides)
    check_used(run, overrides)
    session = prepared(run, num_devices)
    ranks = trace(run, session)
    machine = Machine(speeds[0] or 0, speeds[1] or 0, speeds[2] or float("inf")) if speeds else None
    report = report_of(run, session, ranks, num_devices, machine, measure(run) if with_parts else None)
    if source is not None and not overrides:
        [saved] = find_runs([source])  # unlike `load`, it checks the numbers in the result
        report["measured"] = measured(session, saved.result, source)
    if memory is not None:
        report["memory_bytes"], report["fits"] = memory, max(rank.peak_bytes for rank in ranks) <= memory
    if report["fits"] is False:
        devices = num_devices or max(session.world_size, len(session.devices))
        report["remedies"] = remedies(run, overrides, build, devices, memory or 0)
    return report


def _builder(source: Path | None, config_dir: str | None) -> Callable[[Sequence[str]], Run]:
    """Return a function that builds a run from overrides.

    The overrides change the config of the run in the directory `source` or, if `source` is None, the default config.
    """
    if source is None:
        return lambda overrides: compose_run(overrides, config_dir, "plan")
    run = load(source)
    return lambda overrides: build_run(dict(compose([f"resume={run.directory}", *overrides], config_dir=config_dir)))


def remedies(
    run: Run, overrides: Sequence[str], build: Callable[[Sequence[str]], Run], num_devices: int, memory: float
) -> list[dict[str, Any]]:
    """Try changes of how the run is trained, the cheapest first, until four have been found that make the run fit.

    Each change is tried separately: it is not combined with the changes that were tried before.

    Args:
        run: the run that does not fit.
        overrides: the overrides of its config.
        build: function that builds a run from overrides.
        num_devices: number of devices of the machine.
        memory: memory of each device in bytes.

    Returns:
        A list with a dict for each change that was tried. Changes that are refused or that the config contains already
        are left out. Each dict has the fields of a `Change` as keys, and two more keys:

        - `peak_bytes`: the memory of the rank that needs most, with the change;
        - `fits`: whether the run fits with the change.

        The value of `results` is the text that `Change.effects` returns. It includes the effect of `divides_batches`,
        which the field `results` of a `Change` does not include.
    """
    found: list[dict[str, Any]] = []
    for change in changes(num_devices):
        words = replaced(overrides, *(each for each in change.overrides if "." not in each))
        words += [each for each in change.overrides if "." in each]
        try:
            changed = build(words)
            ranks = [] if changed.config == run.config else trace(changed, prepared(changed, num_devices))
        except (ConfigError, HydraException, OmegaConfBaseException):
            continue
        if not ranks:
            continue
        peak = max(rank.peak_bytes for rank in ranks)
        results = change.effects(ranks[0].normalizes)
        found.append(change._asdict() | {"results": results, "peak_bytes": peak, "fits": peak <= memory})
        if sum(each["fits"] for each in found) == _ENOUGH:
            break
    return found
