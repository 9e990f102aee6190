"""The jobs of a sweep: converts the overrides that the user typed to dimensions, combines their values, and plans the
command, the run directory and the resources of each job.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.composition import Composer, composition_errors
from runner.config.composition import Job as ComposedJob
from runner.config.errors import ABSENT, ConfigError, check, errors_under, wrapped
from runner.config.hydra_errors import explain
from runner.config.options import groups_in_defaults, option_files
from runner.config.overrides import is_sweep_option, override_key, override_value, quoted
from runner.config.schema import build, load_class
from runner.config.sweep_functions import MAX_JOBS
from runner.config.user_code import is_file, typed_files
from runner.run import build_run, config_hash
from runner.storage.run_directory import job_name
from runner.sweeps.engines.base import Demand, Engine, Job
from runner.sweeps.ledger import SHARED_KEYS, console_file
from runner.sweeps.search_space import Dimension
from runner.sweeps.stacking import free_keys, is_free, rest_of, shared_state, why_alone
from runner.sweeps.sweep_values import interval_of, parse_zip, words_of
from runner.workloads.base import Workload

REFUSALS = (ConfigError, HydraException, OmegaConfBaseException)
"""The errors that are raised if a config cannot run."""


class SweepJobs:
    """All combinations of the values that the user listed in the overrides of a sweep.

    Entries of `hydra.sweeper.params` in an option file count as overrides, too. If a key has several, the last counts,
    except that dictionaries, as in `optimizer={lr:0.1},{lr:0.2}`, are combined with what comes before them.

    Attributes:
        engine: the options of the sweep itself.
        dimensions: the keys that the jobs set, each with its values; paired keys form one dimension.
        common: the overrides of `output_root` and `resume`, which are the same for all jobs.
        listed: what option files and globs list, in the form of overrides. If it changes, it is another sweep.

    Raises:
        ConfigError: if there are more than `MAX_JOBS` combinations, a key has no value or the same value twice, an
            interval or paired values are invalid, a swept or paired key is also set by another override, or one of
            `SHARED_KEYS` has several values.
        ConfigError, HydraException, OmegaConfBaseException: if the config of the sweep cannot be composed.
    """

    def __init__(self, composer: Composer, overrides: list[str]):
        self._composer = composer
        typed = [word for word in overrides if not override_key(word).startswith("hydra.")]  # each job resolves them
        zips = [word for word in typed if parse_zip(word)]
        parsed = composer.parse([word for word in typed if word not in zips])
        swept = [each for each in parsed if each.is_sweep_override()]
        # Only the jobs set keys of groups, which may be swept, and may choose files, which Hydra does not know
        of_jobs = {word for word in typed if is_file(word) or word in zips or "." in override_key(word)}
        of_jobs |= {str(each.input_line) for each in swept}
        of_all = [word for word in overrides if word not in of_jobs or is_sweep_option(word)]
        self._config, node, params = self._composed(of_all)
        members = [quoted(member, sweep=True) for word in zips for member in (parse_zip(word) or ("", []))[1]]
        groups = [
            each
            for each in (*swept, *composer.parse(members))
            if composer.has_group(each.get_key_element().lstrip("+"))
        ]
        words = [word for each in groups for [word] in words_of(each, composer.has_group) if not is_file(word)]
        self._studies = {word: self._composed([*of_all, word])[1:] for word in words if composer.is_study(word)}
        """For each option that is swept, and may sweep itself: its node `sweep`, and what it sweeps."""
        if nodes := [of_study for of_study, _ in self._studies.values()]:
            key, node = groups[0].get_key_element(), nodes[0]
            why = "its options say differently how the sweep is run"
            remedy = "type what differs (sweep.slots=1, for example), or sweep them one after the other"
            check(all(each == node for each in nodes), key, ABSENT, why, remedy)
        check(isinstance(node, dict), "sweep", node, "nothing is chosen", "choose one of the options in conf/sweep/")
        self.engine = build(node, Engine, "sweep")
        of_file, found = self._dimensions(params), self._dimensions(typed)
        all_typed = {key for each in found for key in each.keys}
        found = [*of_file, *(self._with_studies(each, all_typed) for each in found)]
        found.sort(key=lambda each: override_key(each.name) not in each.keys)  # paired values last
        last = _last_of_each_key(found, of_file)
        shared = [each for each in last if any(key.partition(".")[0] in SHARED_KEYS for key in each.keys)]
        for each in shared:
            remedy = f"give it one value; a list is in brackets, {each.keys[0]}=[…]"
            check(not each.varies, each.keys[0], ABSENT, "it is the same for all jobs of a sweep", remedy)
        self.common = [word for each in shared if not is_sweep_option(each.keys[0]) for word in each.choices[0]]
        self.dimensions = [each for each in last if each not in shared]
        globs = [each for each in self.dimensions if any(word.startswith(f"{each.name}=glob(") for word in typed)]
        self.listed = params + [f"{word.replace('=', '/')}={each}" for word, (_, each) in self._studies.items() if each]
        self.listed += [f"{each.name}/glob={each.choices}" for each in globs]
        if len(self) > MAX_JOBS:
            most = max(self.dimensions, key=lambda each: len(each.choices)).name
            raise ConfigError(most, ABSENT, f"more than {MAX_JOBS:,} jobs", "sweep over fewer values")
        keys = Counter(key for each in self.dimensions for key in each.keys)
        for key in [key for each in self.dimensions if len(each.keys) > 1 for key in each.keys]:
            why = "it is paired with other keys, and set by another override"
            check(keys[key] == 1, key, ABSENT, why, "leave one out")

    @property
    def swept(self) -> list[str]:
        """The config keys that have several values in this sweep."""
        return [key for each in self.dimensions if each.varies for key in each.keys]

    def __len__(self) -> int:
        return math.prod(len(each.choices) for each in self.dimensions)

    def __iter__(self) -> Iterator[list[str]]:
        for words in itertools.product(*(each.examples for each in self.dimensions)):
            yield list(itertools.chain(*words))

    def compose(self, number: int, overrides: list[str]) -> ComposedJob:
        """Compose the config of job `number` from its overrides and those in `common`.

        Raises:
            ConfigError, HydraException, OmegaConfBaseException: if the config cannot be composed.
        """
        return self._composer.job(self._config, number, [*overrides, *self.common])

    def _composed(self, words: list[str]) -> tuple[DictConfig, Any, list[str]]:
        """Return the config of the sweep that `words` compose, its node `sweep`, and the overrides of option files."""
        config = self._composer.sweep(words)
        with composition_errors():
            node: Any = OmegaConf.to_container(config, resolve=False).get("sweep")  # type: ignore[union-attr]
            params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        for word in filter(is_file, params):
            raise ConfigError(word, ABSENT, "an option file cannot choose code", "type it")
        return config, node, params

    def _dimensions(self, words: list[str]) -> list[Dimension]:
        zips = {word: pairs for word in words if (pairs := parse_zip(word))}
        parsed = self._composer.parse([word for word in words if word not in zips])
        return [*map(self._dimension, parsed), *(self._pairs(word, *pairs) for word, pairs in zips.items())]

    def _with_studies(self, swept: Dimension, typed: Collection[str]) -> Dimension:
        """Return a dimension that also has what its options sweep over themselves, as `experiment=a,b` may do.

        Each option is combined with the values in its own `hydra.sweeper.params`, except for keys that are `typed`.
        """
        keys, choices = dict.fromkeys(swept.keys), list[list[str]]()
        for words in swept.choices:
            params = [param for word in words for param in self._studies.get(word, (None, []))[1]]
            inner = [each for each in self._dimensions(params) if not set(each.keys) & {*typed}]
            for each in inner:
                why = f"{' '.join(words)} searches an interval of it, and is swept itself"
                check(each.interval is None, each.name, ABSENT, why, "search the options one after the other")
                keys |= dict.fromkeys(each.keys)
            choices += [
                [*words, *itertools.chain(*row)] for row in itertools.product(*(each.choices for each in inner))
            ]
        return Dimension(swept.name, tuple(keys), choices, swept.interval)

    def _dimension(self, override: Override) -> Dimension:
        key, value = override.get_key_element(), override.value()
        typed = str(override.input_line).partition("=")[2]
        if isinstance(value, IntervalSweep):
            why = "an interval has no list of values"
            check(self.engine.search is not None, key, typed, why, f"{key}=1,2,3, or sweep.search=tpe to search it")
            return Dimension(key, (override_key(key),), [[]], interval_of(key, typed, value))
        words = words_of(override, self._composer.has_group)
        check(bool(words), key, typed, "it has no values", f"{key}=range(0,10)")
        [(most, count)] = Counter(word for [word] in words).most_common(1)
        check(count == 1, key, typed, f"{most.partition('=')[2]} is in it twice", "leave one out")
        return Dimension(key, (override_key(key),), words)

    def _pairs(self, word: str, name: str, members: list[str]) -> Dimension:
        """Return the dimension for `word`, an override of the form `NAME=zip(KEY=[…],KEY=[…])`."""
        overrides = self._composer.parse([quoted(member, sweep=True) for member in members])
        has_group = self._composer.has_group
        values = {override_key(override.get_key_element()): words_of(override, has_group) for override in overrides}
        listed = ", ".join(f"{key} has {len(words):,}" for key, words in values.items())
        why = f"paired keys must have the same number of values: {listed}"
        check(len({*map(len, values.values())}) == 1, name, word.partition("=")[2], why, "add or remove some")
        rows = zip(*values.values(), strict=True)
        return Dimension(name, tuple(values), [list(itertools.chain(*row)) for row in rows])


def _last_of_each_key(found: list[Dimension], of_file: Collection[Dimension]) -> list[Dimension]:
    """Return the dimensions that count. Hydra merges a dictionary with what was set before it."""
    last: dict[tuple[str, ...], Dimension] = {}
    for each in found:
        before = last.get(each.keys)
        if before and any(word.partition("=")[2].startswith("{") for words in each.choices for word in words):
            both = itertools.product(before.choices, each.choices)
            last[each.keys] = before._replace(choices=[[*first, *then] for first, then in both])
            continue
        if before and before.varies and before not in of_file:
            raise ConfigError(each.name, ABSENT, "it is swept, and then set by another override", "leave one out")
        last[each.keys] = each
    return [*last.values()]


class _Base(NamedTuple):
    config_hash: str  # of the config of the first job
    demand: Demand
    stack_key: str  # what has to be the same for jobs that are computed together; empty if none are
    free: Collection[str]  # keys whose values may differ between them


class Planner:
    """The planner of a sweep's `jobs`; `config_dir` is the value of the flag `--config-dir`.

    Composing a config takes 50 ms. Therefore, the planner composes only one config for all jobs with the same overrides
    of config groups and devices (`parallel.…`, `device.…`). Later, the command of each job composes the job's config.

    Attributes:
        config: the config of the first job that can run, or is refused because of a swept key, of which other values
            may be accepted.
        path: the directory of the sweep. It must be set before `plan` is called.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if no job can run with any options of the swept groups, or
            one of these options does not exist.
    """

    def __init__(self, jobs: SweepJobs, config_dir: str | None):
        self._jobs, folders = jobs, [] if config_dir is None else [Path(os.path.expanduser(config_dir))]
        self._flags = [f"--config-dir={folder}" for folder in folders]
        options = option_files(*folders)
        for word in (word for each in jobs.dimensions for words in each.choices for word in words):
            key = override_key(word)
            if key in options and override_value([word], key) not in options[key]:
                jobs.compose(0, [word])  # raises the error of an option that does not exist, before any job runs
        self._bases: dict[tuple[str, ...], _Base] = {}
        """What is the same for jobs with the same `shared_overrides`."""
        self._configs: dict[tuple[str, ...], dict[str, Any] | None] = {}
        self.path = Path()
        self._remarks = set[str]()
        self.config = self._first_config()

    @property
    def best(self) -> tuple[str, str]:
        """The metric, without the prefix `eval/`, and its goal (`min` or `max`) that select the best checkpoint."""
        with errors_under("workload"):
            options = self.config.get("workload") or {}
            return load_class(options.get("_target_"), Workload).best_for(options)

    def plan(self, number: int, overrides: list[str]) -> Job:
        """Return the job with this number and these overrides. It has a `refusal` if its config cannot run."""
        directory, console = self.path / job_name(number, overrides, self._jobs.swept), console_file(self.path, number)
        key = shared_overrides(overrides)
        try:
            if key not in self._bases:
                self._bases[key] = self._build(self._jobs.compose(number, overrides).config)
        except REFUSALS as error:
            return Job(number, [], console, overrides=overrides, directory=directory, refusal=wrapped(explain(error)))
        config_hash, demand, stack_key, free = self._bases[key]
        where = [word for word in self._jobs.common if override_value([word], "resume") is None]
        flags = [f"--run-directory={directory}", f"--job-number={number}", *self._flags]
        arguments = [*overrides, *where, "resume=auto", *flags]
        known = hashlib.sha256(json.dumps([config_hash, overrides]).encode()).hexdigest()[:12]
        about = {"overrides": overrides, "directory": directory, "config_hash": known}
        files = [file.path for file in typed_files(overrides).values()] if stack_key else []
        if why := next(filter(None, map(shared_state, files)), ""):
            stack_key = ""
            self._remark(why)
        if stack_key:
            others = [word for word in overrides if not is_free(override_key(word), free)]
            others = [word for word in others if word not in key]  # which are in the config that the key has
            about["stack_key"] = json.dumps([stack_key, others])
        return Job(number, arguments, console, demand, **about)

    def _remark(self, why: str) -> None:
        """Say, once, why jobs are not computed together, though `sweep.stack` asks for it."""
        if why not in self._remarks:
            self._remarks.add(why)
            print(f"sweep.stack={self._jobs.engine.stack}: jobs are computed one by one, as {why}", file=sys.stderr)

    def has_key(self, groups: list[str], key: str) -> bool:
        """Return whether the config composed from overrides of groups has the dotted `key`; True if there is none."""
        words = tuple(groups)
        if words not in self._configs:
            self._configs[words] = None
            with suppress(*REFUSALS):
                self._configs[words] = self._jobs.compose(0, groups).config
        config: Any = self._configs[words]
        for name in () if config is None else key.split("."):
            if not isinstance(config, dict) or name not in config:
                return False
            config = config[name]
        return True

    def _first_config(self) -> dict[str, Any]:
        errors: dict[tuple[str, ...], Exception] = {}
        for overrides in self._jobs:
            key = shared_overrides(overrides)
            if key in errors:
                continue
            try:
                config = self._jobs.compose(0, overrides).config
                try:
                    self._bases[key] = self._build(config)
                except ConfigError as error:
                    if error.key not in self._jobs.swept:  # otherwise, another value of that key may be possible
                        raise
                return config
            except REFUSALS as error:
                errors[key] = error
        raise next(iter(errors.values()))

    def _build(self, config: dict[str, Any]) -> _Base:
        run = build_run(config)
        threads = run.device.threads
        try:
            devices = run.parallel.launcher(run.device).devices
            demand = Demand(len(devices), len(devices) if devices[0].type == "cuda" else 0, threads)
        except ConfigError as error:
            is_device = error.key.startswith("device.")
            demand = self._jobs.engine.demand_elsewhere(threads) if is_device else None
            if demand is None:  # otherwise, this machine may only be the login node of a cluster
                raise
        engine, stack_key, free = self._jobs.engine, "", free_keys(run.workload)
        if engine.stack != 1:
            if why := why_alone(run):
                self._remark(why)
            else:
                stack_key = json.dumps(rest_of(run.config, free), sort_keys=True, default=str)
        return _Base(config_hash(run.config), demand, stack_key, free)


def shared_overrides(overrides: list[str]) -> tuple[str, ...]:
    """Return the overrides of config groups and devices. Only these can change the resources that a job needs."""
    places, groups = ("parallel.", "device."), groups_in_defaults()
    keys = {text: override_key(text) for text in overrides}
    return tuple(text for text, key in keys.items() if key.partition("@")[0] in groups or key.startswith(places))
