"""The jobs of a sweep: converts the overrides that the user typed to dimensions, and combines their values."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf

from runner.config.composition import Composer, Job, composition_errors
from runner.config.errors import ABSENT, check
from runner.config.options import groups_in_defaults, root_keys
from runner.config.overrides import is_sweep_option, quoted
from runner.config.schema import build
from runner.sweep.engines.base import Engine
from runner.sweep.space import Dimension, Interval
from runner.sweep.zipped import parse_zip

MAX_JOBS = 10_000
"""The maximum number of jobs in a sweep. A larger sweep is probably a typing error, or should be divided."""

_SAME_FOR_ALL = ("output_root", "resume")
"""Keys that say where a sweep is and whether it is resumed, and not what its jobs compute."""


class SweepJobs:
    """All combinations of the values that the user listed in the overrides of a sweep.

    Entries of `hydra.sweeper.params` in an option file count as overrides, too. If a key has several, the last counts.

    Attributes:
        engine: the options of the sweep itself.
        dimensions: the keys that the jobs set, each with its values; paired keys form one dimension.
        common: the overrides of `output_root` and `resume`, which are the same for all jobs.

    Raises:
        ConfigError: if there are more than `MAX_JOBS` combinations, a key has no value or the same value twice, an
            interval or paired values are invalid, or a paired key is also set by another override.
        ConfigError, HydraException, OmegaConfBaseException: if the config of the sweep cannot be composed.
    """

    def __init__(self, composer: Composer, overrides: list[str]):
        self._composer = composer
        zips = [word for word in overrides if parse_zip(word)]
        self._config = composer.sweep([word for word in overrides if word not in zips])
        with composition_errors():
            node: Any = OmegaConf.to_container(self._config, resolve=False).get("sweep")  # type: ignore[union-attr]
            params = [f"{key}={value}" for key, value in (self._config.hydra.sweeper.params or {}).items()]
            typed: Any = OmegaConf.to_container(self._config.hydra.overrides, resolve=False)  # each job resolves them
        check(isinstance(node, dict), "sweep", node, "nothing is chosen", "choose one of the options in conf/sweep/")
        self.engine = build(node, Engine, "sweep")
        zips += [word for word in params if parse_zip(word)]
        parsed = composer.parse([word for word in [*params, *typed["task"]] if word not in zips])
        self._check_count({override.key_or_group: _count(override) for override in parsed})
        found = [*map(self._dimension, parsed), *map(self._pairs, zips)]
        last = list({each.keys: each for each in found}.values())  # what is typed later counts
        constant = [each for each in last if not each.varies]
        self.common = [word for each in constant if each.keys[0] in _SAME_FOR_ALL for word in each.first]
        self.dimensions = [
            each for each in last if each.varies or not (each.keys[0] in _SAME_FOR_ALL or is_sweep_option(each.keys[0]))
        ]
        self._check_count({each.name: len(each.choices) for each in self.dimensions})
        self._check_pairs()

    @property
    def swept(self) -> list[str]:
        """The config keys that have several values in this sweep."""
        return [key for each in self.dimensions if each.varies for key in each.keys]

    def __len__(self) -> int:
        return math.prod(len(each.choices) for each in self.dimensions)

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the overrides of each job."""
        for words in itertools.product(*(each.choices for each in self.dimensions)):
            yield list(itertools.chain(*words))

    def samples(self) -> Iterator[list[str]]:
        """Yield the overrides of one job for each combination of the options of the swept config groups.

        Every other key has its first value, because only the options of the config groups determine which keys exist:
        `model=tiny,resnet18 optimizer.lr=0.1,0.2` gives one job for each model, both with the first learning rate.
        """
        groups = groups_in_defaults()
        few = [
            each.choices if any(_bare(key).partition("@")[0] in groups for key in each.keys) else [each.first]
            for each in self.dimensions
        ]
        for words in itertools.product(*few):
            yield list(itertools.chain(*words))

    def compose(self, number: int, overrides: list[str]) -> Job:
        """Compose the config of job `number` from its overrides and those in `common`.

        Raises:
            ConfigError, HydraException, OmegaConfBaseException: if the config cannot be composed.
        """
        return self._composer.job(self._config, number, [*overrides, *self.common])

    def _dimension(self, override: Override) -> Dimension:
        key, value = override.get_key_element(), override.value()
        typed = str(override.input_line).partition("=")[2]
        if not isinstance(value, IntervalSweep):
            words = _words(override)
            check(bool(words), key, typed, "it has no values", f"{key}=range(0,10)")
            counts = Counter(word for [word] in words)  # there may be thousands
            twice = next((word for word, count in counts.items() if count > 1), "")
            why = f"{twice.partition('=')[2]} is in it twice"
            check(not twice, key, typed, why, "a job that is repeated gives the same result: leave one out")
            return Dimension(key, (_bare(key),), words)
        why = "an interval has no list of values"
        check(self.engine.search is not None, key, typed, why, f"{key}=1,2,3, or sweep.search=tpe to search it")
        return Dimension(key, (_bare(key),), [[]], _interval(key, typed, value))

    def _pairs(self, word: str) -> Dimension:
        """Return the dimension for an override of the form `NAME=zip(KEY=[…],KEY=[…])`."""
        name, members = parse_zip(word) or ("", [])
        why = "it names the pairs, and must not be a key of the config"
        typed = word.partition("=")[2]
        check(name not in root_keys(), name, typed, why, f"pairs={typed}")
        overrides = self._composer.parse([quoted(member, sweep=True) for member in members])
        counts = {override.key_or_group: _count(override) for override in overrides}
        listed = ", ".join(f"{key} has {count:,}" for key, count in counts.items())
        why = f"paired keys must have the same number of values: {listed}"
        check(len(set(counts.values())) == 1, name, typed, why, "add or remove some")
        self._check_count(dict(list(counts.items())[:1]))
        keys = tuple(_bare(override.get_key_element()) for override in overrides)
        rows = zip(*map(_words, overrides), strict=True)
        return Dimension(name, keys, [list(itertools.chain(*row)) for row in rows])

    def _check_pairs(self) -> None:
        """Raise a `ConfigError` if a paired key is also set by another override."""
        keys = [key for each in self.dimensions for key in each.keys]
        paired = [key for each in self.dimensions if len(each.keys) > 1 for key in each.keys]
        twice = next((key for key in paired if keys.count(key) > 1), "")
        check(not twice, twice, ABSENT, "it is paired with other keys, and set by another override", "leave one out")

    def _check_count(self, counts: dict[str, int]) -> None:
        most = max(counts, key=lambda key: counts[key], default="")
        count = math.prod(counts.values())
        why = f"the sweep has {count:,} jobs, more than {MAX_JOBS:,}"
        check(count <= MAX_JOBS, most, ABSENT, why, "sweep over fewer values, or in several sweeps")


def _interval(key: str, typed: str, value: IntervalSweep) -> Interval:
    low, high = value.start, value.end
    is_range = isinstance(low, int | float) and isinstance(high, int | float) and -math.inf < low < high < math.inf
    check(is_range, key, typed, "the interval is empty or not finite", "interval(LOW,HIGH) with LOW < HIGH")
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    check(value.tags <= {"log"}, key, typed, "the only tag of an interval is log", f"{key}=tag(log,interval(1e-4,1))")
    log = "log" in value.tags
    check(low > 0 or not log, key, typed, "a logarithm needs values above 0", f"{key}=tag(log,interval(1e-4,1))")
    return Interval(low, high, log, isinstance(low, int) and isinstance(high, int))


def _count(override: Override) -> int:
    """Return the number of values of an override, without listing those of a range that is too long anyway."""
    swept = override.value()
    if not override.is_discrete_sweep():
        return 1
    if isinstance(swept, RangeSweep):
        start, stop, step = (float(value) for value in (swept.start or 0, swept.stop or 0, swept.step))
        key, typed = override.key_or_group, str(override.input_line).partition("=")[2]
        usable = step != 0 and all(math.isfinite(value) for value in (start, stop, step, (stop - start) / step))
        check(usable, key, typed, "a range needs finite numbers, and a step that is not 0", f"{key}=range(0,10,1)")
        if (stop - start) / step > MAX_JOBS + 1:  # of fewer, rounding may add or remove one: Hydra has to list them
            return math.ceil((stop - start) / step)
    return len(list(override.sweep_string_iterator()))


def _words(override: Override) -> list[list[str]]:
    """Return a list of one override for each value: `lr=1,2` gives `[["lr=1"], ["lr=2"]]`."""
    key = override.get_key_element()
    if override.is_sweep_override():
        return [[f"{key}={value}"] for value in override.sweep_string_iterator()]
    return [[str(override.input_line)]]


def _bare(key: str) -> str:
    return key.lstrip("+~")
