"""The summary of a sweep for TensorBoard: the columns of the HPARAMS tab, tables and a figure."""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from runner.config.options import groups_in_defaults
from runner.config.overrides import as_typed
from runner.storage.run_directory import read_result
from runner.sweep.ledger_reader import is_plain_name, read_ledger
from runner.sweep.metric_direction import direction
from runner.system.installed import is_installed
from runner.system.utf8 import printable
from runner.tracking.mean_std import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

_REPEATS = ("seed", "repeat")
"""The config keys that distinguish repetitions of the same experiment."""

_MOST_KEYS, _MOST_ROWS = 9, 50
_SPEED = "time/samples_per_second"


class BestJob(NamedTuple):
    """The best job of a sweep.

    Args:
        number: the number of the job.
        name: the name of its run directory.
        metric: the tag of the metric by which most jobs of the sweep select their best checkpoint.
        value: the job's best value of `metric`. If the job selects its best checkpoint by another metric, its last
            value of `metric`.
    """

    number: int
    name: str
    metric: str
    value: float


class _Job(NamedTuple):
    number: int
    path: Path
    values: dict[str, str]
    result: dict[str, Any]


class _Sweep:
    """The jobs of the sweep at `path` that are done, their metrics, and the config keys in which the jobs differ."""

    def __init__(self, path: Path):
        entries = read_ledger(path).get("jobs", {}).items()
        typed = {number: _typed(entry.get("overrides", [])) for number, entry in entries}
        known = dict.fromkeys(key for values in typed.values() for key in values)
        found = {key: list(dict.fromkeys(v[key] for v in typed.values() if key in v)) for key in known}
        self.swept = {key: values for key, values in found.items() if len(values) > 1}
        self.states = Counter(str(entry.get("state", "unknown")) for _, entry in entries)
        results = [
            _Job(int(number), path / entry["directory"], typed[number], read_result(path / entry["directory"]))
            for number, entry in entries
            if is_plain_name(entry.get("directory", ""))
        ]
        self.done = [job for job in results if job.result.get("status") == "done"]
        best = Counter(str(job.result["best"]["metric"]) for job in self.done if job.result.get("best"))
        self.metric = best.most_common(1)[0][0] if best else ""
        self.measured = [(job, value) for job in self.done if (value := _best(job, self.metric)) is not None]
        self.goal = direction(self.metric, {job.path: job.result for job in self.done}) if self.metric else "max"

    @property
    def best_first(self) -> list[tuple[_Job, float]]:
        """Pairs of a job and its best value of the metric, sorted from the best job to the worst."""
        return sorted(self.measured, key=lambda pair: -pair[1] if self.goal == "max" else pair[1])

    def over(self, key: str) -> list[tuple[Any, float]]:
        """Return pairs of the value of `key` and the best value of the metric, one pair for each job that has both.

        Jobs with the same value of `key` are adjacent. The values of `key` are in the order in which they first occur
        in the ledger.
        """
        order = {typed: i for i, typed in enumerate(self.swept[key])}
        jobs = sorted((pair for pair in self.measured if key in pair[0].values), key=lambda p: order[p[0].values[key]])
        return [(_value(key, job.values[key]), number) for job, number in jobs]


def best_job(path: Path) -> BestJob | None:
    """Return the best job of the sweep at `path`; None if no finished job has been evaluated."""
    jobs = (sweep := _Sweep(path)).best_first
    return BestJob(jobs[0][0].number, jobs[0][0].path.name, sweep.metric, jobs[0][1]) if jobs else None


def write_summary(path: Path) -> None:
    """Write the summary of a sweep as a TensorBoard event file in the sweep's directory, replacing any older summary.

    The summary consists of the columns of the HPARAMS tab, tables as text and, if matplotlib is installed, a figure
    that shows the metric for the values of each swept key. If no key has several values or no job is done, nothing is
    written. If writing fails, a warning is logged.

    Args:
        path: the directory of the sweep.
    """
    try:
        _write(path)
    except Exception as error:  # the jobs are done, and their results are saved: nothing here may fail the sweep
        log.warning("the summary of the sweep cannot be written: %s", printable(f"{type(error).__name__}: {error}"))


def _write(path: Path) -> None:
    sweep = _Sweep(path)
    if not sweep.swept or not sweep.done:
        return
    from torch.utils.tensorboard.summary import text  # imported here, because a sweep without jobs needs none of it

    from runner.tracking.event_file import EventFile
    from runner.tracking.hparams import columns

    for old in path.glob("events.out.tfevents.*"):  # TensorBoard would keep the columns of the first file
        old.unlink()
    file = EventFile(path, first_step=0)
    try:
        file.add(columns(_hparams(sweep), _metrics(sweep)))
        file.add(text("sweep/summary", _tables(sweep)))
        if (figure := _figure(sweep)) is not None:
            from runner.tracking.charts import image_summary

            file.add(image_summary(f"sweep/{sweep.metric.rpartition('/')[2]}", figure))
    finally:
        file.close()


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


def _typed(overrides: list[Any]) -> dict[str, str]:
    """Return a dictionary that maps the key of each override to its value, as the text that the user typed."""
    pairs = (str(text).lstrip("+").partition("=") for text in overrides)
    return {key: value for key, equals, value in pairs if equals}


def _best(job: _Job, metric: str) -> float | None:
    """Return the best value of `metric` in a job if this metric selects the best checkpoint, otherwise the last value.

    Return None if the job did not measure `metric`, or the value is not finite.
    """
    best = job.result.get("best", {})
    value = best["value"] if best.get("metric") == metric else job.result.get("metrics", {}).get(metric)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None  # not if nan


def _value(key: str, typed: str) -> float | str | bool | None:
    """Convert `typed`, the text of the value of `key`, to the value that the run's own row of the HPARAMS tab has.

    This is a float, a bool or None, and otherwise a text. Quoted values and options of config groups, such as `16` in
    `precision=16`, are always text, and so are lists, which are spelled as in `as_typed`.
    """
    if key.partition("@")[0] in groups_in_defaults() or typed[:1] in ("'", '"'):
        return printable(typed.strip("'\""))
    if typed.startswith("["):
        with suppress(HydraException):
            return printable(as_typed(OverridesParser.create().parse_override(f"{key}={typed}").value()))
    words = {"null": None, "true": True, "false": False}
    if typed.lower() in words:
        return words[typed.lower()]
    try:
        number = float(typed)
    except ValueError:
        return printable(typed)
    return number if math.isfinite(number) else printable(typed)


def _hparams(sweep: _Sweep) -> dict[str, list[float | str | bool]]:
    """Return a dictionary that maps each swept key to the list of its values, without null.

    In the HPARAMS tab, null would turn a column of numbers into a column of text.
    """
    values = {key: [_value(key, text) for text in typed] for key, typed in sweep.swept.items()}
    known = {
        printable(key): [*{(type(value), value): value for value in each if value is not None}.values()]
        for key, each in values.items()
    }
    return {key: each for key, each in known.items() if each}


def _metrics(sweep: _Sweep) -> list[str]:
    """Return the metric tags for the HPARAMS tab: the metric that ranks jobs, other eval and train metrics, speed."""
    tags = dict.fromkeys(tag for job in sweep.done for tag in map(str, job.result.get("metrics", {})))
    groups = [[sweep.metric], *([tag for tag in tags if tag.startswith(start)] for start in ("eval/", "train/"))]
    return list(dict.fromkeys(printable(tag) for tag in (*(t for group in groups for t in group if t), _SPEED)))


# ---------------------------------------------------------------------------------------------------------------------
# Tables and pictures


def _tables(sweep: _Sweep) -> str:
    """Return Markdown text with the number of jobs in each state, and tables of the results.

    The first table lists the best jobs. For each swept key except those in `_REPEATS`, a further table lists the mean
    of the metric over the jobs with the same value of this key. There are at most `_MOST_KEYS` such tables.
    """
    ended = ", ".join(f"{count} {state}" for state, count in sweep.states.most_common())
    parts = [f"{sum(sweep.states.values())} jobs: {ended}"]
    if sweep.measured:
        metric = f"best {sweep.metric}"
        best = [[job.path.name, _digits(value)] for job, value in sweep.best_first[:10]]
        parts.append(_table(["job", metric], best))
        for key in [key for key in sweep.swept if key not in _REPEATS][:_MOST_KEYS]:
            groups: dict[str, list[float]] = {}
            for value, number in sweep.over(key):
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                groups.setdefault(shown, []).append(number)
            spreads = {value: Spread.of(numbers) for value, numbers in groups.items()}
            rows = [[v, str(len(groups[v])), f"{_digits(s.mean)} ± {_digits(s.bar)}"] for v, s in spreads.items()]
            parts.append(_table([key, "jobs", f"{metric}, mean ± standard deviation"], rows[:_MOST_ROWS]))
    return printable("\n\n".join(parts))


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/').replace('`', '') for cell in line)} |" for line in lines)


def _digits(value: float) -> str:
    return f"{value:.4g}"


def _figure(sweep: _Sweep) -> Figure | None:
    """Plot the metric against each swept key.

    The keys in `_REPEATS` and keys with fewer than two jobs to plot are left out. At most `_MOST_KEYS` keys are shown.
    The result is None if no key remains, or if matplotlib is not installed.
    """
    keys = [key for key in sweep.swept if key not in _REPEATS and len(sweep.over(key)) > 1][:_MOST_KEYS]
    if not keys or not is_installed("matplotlib"):
        return None
    from runner.tracking import charts

    caption = f"{len(sweep.measured)} jobs; line and band: mean and standard deviation over all jobs with this value"
    title = f"best {sweep.metric} over each swept key"
    figure, panels = charts.canvas(title, caption, (4.2, 3.4), len(keys))
    for axes, key in zip(panels, keys, strict=True):
        charts.over_values(axes, sweep.over(key))
        charts.scale_y(axes, [number for _, number in sweep.measured])
        axes.set_xlabel(charts.shown(key, 40))
        axes.set_ylabel(charts.shown(sweep.metric, 40))
    return figure
