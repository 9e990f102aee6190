"""The summary of a sweep for TensorBoard: the columns of the HPARAMS tab, tables and a figure."""

from __future__ import annotations

import logging
import math
import shlex
from collections import Counter
from collections.abc import Iterable
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


class Best(NamedTuple):
    """The results of the best combination of swept values, where jobs that differ only in their seed are one.

    Args:
        name: the name of the job's run directory; if there are several jobs, the swept overrides that they share.
        metric: the tag of the metric by which most jobs of the sweep select their best checkpoint.
        values: the best value of `metric` of each job. If a job selects its best checkpoint by another metric, its last
            value of `metric`.
    """

    name: str
    metric: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return Spread.of(self.values).mean

    def __str__(self) -> str:
        number = f"{self.metric} {self.mean:.4f}"
        if len(self.values) > 1:
            number += f" ± {Spread.of(self.values).deviation:.4f}, the mean of {len(self.values)} seeds"
        return f"best {number}: {self.name}" if self.name else number


class _Job(NamedTuple):
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
            _Job(path / entry["directory"], typed[number], read_result(path / entry["directory"]))
            for number, entry in entries
            if is_plain_name(entry.get("directory", ""))
        ]
        self.done = [job for job in results if job.result.get("status") == "done"]
        best = Counter(str(job.result["best"]["metric"]) for job in self.done if job.result.get("best"))
        self.metric = best.most_common(1)[0][0] if best else ""
        self.measured = [(job, value) for job in self.done if (value := _best(job, self.metric)) is not None]
        self.goal = direction(self.metric, {job.path: job.result for job in self.done}) if self.metric else "max"

    @property
    def best_first(self) -> list[Best]:
        """The results of the combinations of swept values, sorted from the best mean to the worst.

        A combination with fewer seeds that are done than another one is left out, because its mean is not comparable.
        """
        shared = [key for key in self.swept if key not in _REPEATS]
        groups: dict[str, list[tuple[_Job, float]]] = {}
        for job, value in self.measured:
            words = [f"{key}={job.values[key]}" for key in shared if key in job.values]
            groups.setdefault(printable(shlex.join(words)), []).append((job, value))
        most = max(map(len, groups.values()), default=0)
        found = [
            Best(words if most > 1 else jobs[0][0].path.name, self.metric, tuple(value for _, value in jobs))
            for words, jobs in groups.items()
            if len(jobs) == most
        ]
        return sorted(found, key=lambda each: each.mean, reverse=self.goal == "max")

    def over(self, key: str) -> list[tuple[Any, float]]:
        """Return pairs of the value of `key` and the best value of the metric, one pair for each job that has both.

        Jobs with the same value of `key` are adjacent. The values of `key` are in the order in which they first occur
        in the ledger.
        """
        order = {typed: i for i, typed in enumerate(self.swept[key])}
        jobs = sorted((pair for pair in self.measured if key in pair[0].values), key=lambda p: order[p[0].values[key]])
        return [(_value(key, job.values[key]), number) for job, number in jobs]


def find_best(path: Path) -> Best | None:
    """Return the best combination of the sweep at `path`; None if no finished job has been evaluated."""
    return next(iter(_Sweep(path).best_first), None)


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

    for old in path.glob(f"events.out.tfevents.{10 * '[0-9]'}"):  # TensorBoard would keep the columns of the first file
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

    The first table lists the best combinations. For each swept key except those in `_REPEATS`, a further table lists
    the mean of the metric over the jobs with the same value of this key. There are at most `_MOST_KEYS` such tables.
    """
    ended = ", ".join(f"{count} {state}" for state, count in sweep.states.most_common())
    parts = [f"{sum(sweep.states.values())} jobs: {ended}"]
    if sweep.measured:
        metric, first = f"best {sweep.metric}", sweep.best_first[:10]
        if len(first[0].values) == 1:
            parts.append(_table(["job", metric], [[each.name, _digits(each.mean)] for each in first]))
        else:
            rows = [[each.name or "all", str(len(each.values)), _mean(each.values)] for each in first]
            parts.append(_table(["job", "seeds", f"{metric}, mean ± standard deviation"], rows))
        for key in [key for key in sweep.swept if key not in _REPEATS][:_MOST_KEYS]:
            groups: dict[str, list[float]] = {}
            for value, number in sweep.over(key):
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                groups.setdefault(shown, []).append(number)
            rows = [[value, str(len(numbers)), _mean(numbers)] for value, numbers in groups.items()]
            parts.append(_table([key, "jobs", f"{metric}, mean ± standard deviation"], rows[:_MOST_ROWS]))
    return printable("\n\n".join(parts))


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/').replace('`', '') for cell in line)} |" for line in lines)


def _mean(numbers: Iterable[float]) -> str:
    spread = Spread.of(numbers)
    return f"{_digits(spread.mean)} ± {_digits(spread.bar)}"


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
