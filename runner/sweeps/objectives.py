"""The metrics by which the jobs of a sweep are compared."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from runner.config.errors import ConfigError, check, did_you_mean
from runner.result import MEASURED, measured
from runner.sweeps.engines.base import Engine


class Objective(NamedTuple):
    """A metric by which jobs are compared."""

    tag: str  # its TensorBoard tag
    goal: str  # min or max
    best: bool  # whether the best values of the jobs are compared, and not their last ones

    def value(self, result: dict[str, Any], may_lack: bool = False) -> float:
        """Return the value in the result of a job that is done; NaN if the metric was not defined.

        Raises:
            ConfigError: if the job did not measure it, unless it `may_lack` it; then, the value is NaN.
        """
        values, best = measured(result), result.get("best") or {}
        value = best["value"] if self.best and best.get("metric") == self.tag else values.get(self.tag, "")
        if value is None or (value == "" and may_lack):
            return math.nan
        if not isinstance(value, int | float):
            why = f"the jobs do not measure it, but {', '.join(sorted(values)) or 'nothing'};"
            raise ConfigError("sweep.metric", self.tag, why, did_you_mean(self.tag, values))
        return value


def objectives_of(options: Engine, best: tuple[str, str]) -> list[Objective]:
    """Return the objectives that the `options` of a sweep name, or that of `best`: a metric of evaluations, its goal.

    Raises:
        ConfigError: if a metric is named twice, no job can measure it, or its goal is not known; or if there is no goal
            for each metric, or pruning by several metrics.
    """
    name, goal = best
    known = {f"eval/{name}": goal, **MEASURED}
    tags, goals = _listed(options.metric), _listed(options.goal)
    why, remedy = "it has no tag, or an empty one", "null, or for example [eval/accuracy,time/samples_per_second]"
    check(options.metric is None or all([tags, *tags]), "sweep.metric", options.metric, why, remedy)
    check(len({*tags}) == len(tags), "sweep.metric", options.metric, "a metric is in it twice", "leave one out")
    remedy = f"sweep.goal=[{','.join(['max'] * len(tags))}], for example" if len(tags) > 1 else "sweep.goal=max"
    why = f"sweep.metric has {len(tags) or 'no'} metric{'s' * (len(tags) != 1)}, and each needs a goal"
    check(len(goals or tags) == len(tags), "sweep.goal", options.goal, why, remedy if tags else "add sweep.metric=TAG")
    why = "with several metrics, no trial is worse than another before both have ended"
    check(options.prune is None or len(tags) < 2, "sweep.prune", options.prune, why, "leave it out, or name one metric")
    objectives = []
    for tag, given in zip(tags, goals or [None] * len(tags), strict=True):
        can_be = tag in known or tag.startswith(("eval/", "train/"))
        check(can_be, "sweep.metric", options.metric, f"no job has {tag} in its result;", did_you_mean(tag, known))
        if (goal := given or known.get(tag)) is None:
            why = f"it is not known whether larger or smaller values of {tag} are better"
            say = f"say it of each: {remedy}" if len(tags) > 1 else "add sweep.goal=min or sweep.goal=max"
            raise ConfigError("sweep.metric", options.metric, why, say)
        objectives.append(Objective(tag, goal, best=False))
    return objectives or [Objective(f"eval/{name}", best[1], best=True)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
