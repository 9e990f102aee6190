"""A search, which chooses the combinations of values that a sweep tries, one after another.

In a grid search, all combinations are tried. In any other search, Optuna chooses the combinations. The results of every
search are stored in an Optuna study.

A trial is one combination of values, with one job for each seed. The ledger records the state of each job. The study,
which is the file `study.log` next to the ledger, records the values and the result of each trial. The result is
recorded only when all jobs of the trial have ended, so that a killed search can be resumed without repeating jobs or
losing results.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.config.errors import ConfigError, check
from runner.storage.files import read_regular, write_bytes
from runner.storage.ledger_file import num_jobs
from runner.sweep.engines.base import MOST_TRIALS, Engine
from runner.sweep.ledger import STUDY, Ledger
from runner.sweep.objective import Curve, Objective
from runner.sweep.pruning import PRUNERS, mean_curve
from runner.sweep.scheduler import JobSource, PlannedJob
from runner.sweep.space import Dimension
from runner.system.exit_codes import CRASHED, DONE, INTERRUPTED, REFUSED, STOPPED

if TYPE_CHECKING:
    import optuna

_LIMIT_BYTES = 256_000_000

Plan = Callable[[int, list[str]], PlannedJob]


class Space:
    """The combinations of values that a search may try.

    Args:
        dimensions: the dimensions of the sweep, including dimensions with a single value.
        exists: a function `exists(overrides, key)` that returns whether a config has `key`. The config is composed with
            `overrides`, which choose the options of config groups.
        groups: the names of all config groups.
    """

    def __init__(self, dimensions: list[Dimension], exists: Callable[[list[str], str], bool], groups: Collection[str]):
        self.dimensions = sorted(dimensions, key=lambda each: not _sets_group(each, groups))
        self._groups, self._exists = groups, exists

    def overrides(self, value: Callable[[Dimension], list[str]]) -> list[str]:
        """Return the overrides of one combination.

        The options of the config groups are chosen first. Any other dimension is left out if one of its keys does not
        exist in the config that is composed with these options.

        Args:
            value: a function that chooses a value of a dimension, and returns the overrides that set this value.
        """
        words: list[str] = []
        chosen: list[str] = []
        for each in self.dimensions:
            if _sets_group(each, self._groups):
                chosen += value(each)
            elif all(self._exists(chosen, key) for key in each.keys):
                words += value(each)
        return [*chosen, *words]

    @cached_property
    def combinations(self) -> list[list[str]] | None:
        """The overrides of each distinct combination; None if there are more than a search can try."""
        if math.prod(each.num_values for each in self.dimensions) > MOST_TRIALS:
            return None
        found: dict[tuple[str, ...], list[str]] = {}
        for combination in itertools.product(*(each.values for each in self.dimensions)):
            by_name = {each.name: words for each, words in zip(self.dimensions, combination, strict=True)}
            overrides = self.overrides(lambda each, by_name=by_name: by_name[each.name])
            found[tuple(overrides)] = overrides
        return [*found.values()]

    def contains(self, overrides: object) -> bool:
        """Return whether `overrides` is a list in which each item is an override that sets a value in this space.

        Whether the items are a complete combination is not checked. The argument may be of any type, because it is read
        from the file of a study, which may be damaged or made by somebody else.
        """
        return isinstance(overrides, list) and all(
            isinstance(word, str) and any(each.contains(word) for each in self.dimensions) for word in overrides
        )

    def __repr__(self) -> str:
        return json.dumps(self.dimensions)


class Search(NamedTuple):
    """What a search does.

    Args:
        space: the combinations that the search may try.
        options: the options of the sweep.
        objective: the metric by which trials are compared.
        seed: the seed of the first job of each trial; each further job of the trial has the next higher seed. None: a
            trial has one job, whose seed the search does not set.
    """

    space: Space
    options: Engine
    objective: Objective
    seed: int | None = None

    @property
    def num_trials(self) -> int:
        """The number of trials. No combination is tried twice."""
        if self.space.combinations is None:
            return self.options.trials
        count = len(self.space.combinations)
        return count if self.options.search == "grid" else min(self.options.trials, count)

    def open_study(self, path: Path) -> optuna.Study:
        """Return the Optuna study in the directory `path` of the sweep, or a new study if there is none.

        Raises:
            ConfigError: if Optuna is not installed, the study is damaged, or it belongs to a search with another space,
                metric, `sweep.search` or `sweep.seeds`.
        """
        return open_study(path / STUDY, self.options, self.objective, repr(self.space))

    def has_more(self, path: Path, ledger: dict[str, Any]) -> bool:
        """Return whether this search can continue the complete search in the directory `path`, with more trials.

        Args:
            path: the directory of the search.
            ledger: the content of its ledger, as `read_ledger` returns it.
        """
        if not (path / STUDY).is_file() or num_jobs(ledger) >= self.num_trials * self.options.seeds:
            return False
        with suppress(ConfigError):  # it is another search, or damaged
            self.open_study(path)
            return True
        return False


class Trial:
    """A trial of a search: one combination of values, with one job for each seed.

    Args:
        trial: the trial in Optuna's study.
    """

    def __init__(self, trial: optuna.Trial):
        self.optuna = trial
        self.jobs: dict[int, PlannedJob] = {}
        self.codes: dict[int, int] = {}
        self.values: dict[int, float] = {}
        self.num_passed = 0
        """The number of evaluations so far after which the pruner has let the trial continue."""
        self.is_paused = False


class SearchJobs(JobSource):
    """The jobs of a search.

    Args:
        search: what the search does.
        plan: a function `plan(number, overrides)` that returns the planned job with this number and these overrides.
        ledger: the ledger of the sweep.

    Raises:
        ConfigError: if Optuna is not installed, or the study in the sweep's directory is damaged or belongs to a search
            with another space, metric, `sweep.search` or `sweep.seeds`.
    """

    def __init__(self, search: Search, plan: Plan, ledger: Ledger):
        self._search, self._plan, self._ledger = search, plan, ledger
        self._space, options, self.objective, self._seed = search
        self._options, self._num_seeds = options, options.seeds
        self._pruner = PRUNERS[options.prune](self.objective) if options.prune else None
        self._trials: dict[int, Trial] = {}
        self._jobs: deque[PlannedJob] = deque()
        self._curves: dict[int, Curve] = {}
        self._final: dict[int, list[float]] = {}
        self._study = search.open_study(ledger.path)
        for frozen in self._study.get_trials(deepcopy=False):
            words = frozen.user_attrs.get("overrides", [])
            remedy = "resume=never starts another sweep"
            check(self._space.contains(words), "resume", "auto", f"{ledger.path / STUDY} is damaged", remedy)
            if not frozen.state.is_finished():  # an earlier command was stopped before its end
                self._add(self._optuna_trial(frozen))
            elif self._pruner:
                for job in self._planned(frozen.number, words):
                    self._final[job.number] = Curve(job.directory, self.objective.tag).read()

    @property
    def num_trials(self) -> int:
        """The number of trials of the search, including those of earlier commands; a trial has one job per seed."""
        return max(self._search.num_trials, self._num_asked)

    def __len__(self) -> int:
        return self.num_trials * self._num_seeds

    def is_complete(self, num_settled: int) -> bool:
        return self._num_asked >= self.num_trials and not self._trials

    def next(self) -> PlannedJob | None:
        self._continue_paused()
        if not self._jobs and self._num_asked < self.num_trials:
            self._add(self._study.ask())
        if self._jobs:
            return self._jobs.popleft()
        return None

    def tell(self, number: int, code: int, result: dict[str, Any]) -> None:
        trial = self._trials.get(number // self._num_seeds)
        if trial is None:
            return
        trial.codes[number] = STOPPED if code == INTERRUPTED else code
        if code == DONE:
            trial.values[number] = self.objective.value(result)
        self._final[number] = self._curves.pop(number).read() if self._pruner else []
        if len(trial.codes) == self._num_seeds and STOPPED not in trial.codes.values():
            self._finish(trial)

    def unpromising(self, running: Collection[int]) -> list[int]:
        if self._pruner is None:
            return []
        curves = self._all_curves()
        for index, trial in self._trials.items():
            curve = curves.get(index, [])
            while not trial.is_paused and trial.num_passed < len(curve):
                if self._passes(index, curves):
                    trial.num_passed += 1
                else:
                    self._pause(trial)
        return [number for number in running if self._trials[number // self._num_seeds].is_paused]

    def close(self) -> None:
        """Record paused trials as pruned in the study, if all other trials have ended and no new trial will start."""
        from optuna.trial import TrialState

        unfinished = [trial for trial in self._trials.values() if not trial.is_paused]
        if self._num_asked >= self.num_trials and not unfinished:
            for trial in self._trials.values():
                self._study.tell(trial.optuna, state=TrialState.PRUNED)
            self._trials.clear()

    def best(self) -> tuple[list[str], float] | None:
        """Return the overrides of the best trial and its value; None if there is no successful trial.

        A trial is successful if each of its jobs has ended with exit code 0. The overrides do not include the seeds
        that the search sets. The value is the mean over the jobs of the trial.
        """
        from optuna.trial import TrialState

        complete = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if not complete:
            return None
        best = self._study.best_trial
        return best.user_attrs["overrides"], float(best.value or 0.0)

    @property
    def _num_asked(self) -> int:
        return len(self._study.get_trials(deepcopy=False))

    def _optuna_trial(self, frozen: optuna.trial.FrozenTrial) -> optuna.Trial:
        """Return the Optuna trial with which `frozen`, an unfinished trial of an earlier command, can continue."""
        import optuna

        return optuna.Trial(self._study, frozen._trial_id)

    def _suggested(self, trial: optuna.Trial, dimension: Dimension, allowed: list[list[str]] | None) -> list[str]:
        """Return the overrides that set `dimension` to the value that Optuna's sampler suggests.

        If `allowed` is not None, a suggestion that is not one of these values is replaced by one of them.

        The value depends only on the sampler's seed, the number of the trial, the dimension and the results so far. If
        a search is killed after it has stored some values of a trial, the resumed search therefore draws the remaining
        values just as the killed search would have drawn them.
        """
        import optuna

        index = self._space.dimensions.index(dimension)
        known = f"{self._options.sampler_seed} {trial.number} {index}"
        seed = int.from_bytes(hashlib.sha256(known.encode()).digest()[:4], "big")
        tpe = self._options.search == "tpe"
        samplers = optuna.samplers
        sampler = samplers.TPESampler(seed=seed, multivariate=False) if tpe else samplers.RandomSampler(seed)
        if allowed is not None:
            from runner.sweep.untried import UntriedSampler  # imported here, because it imports Optuna

            whole_numbers = dimension.interval is not None
            texts = [int(words[0].partition("=")[2]) if whole_numbers else " ".join(words) for words in allowed]
            sampler = UntriedSampler(sampler, texts, seed)
        self._study.sampler = sampler
        if interval := dimension.interval:
            low, high, log, whole = interval
            if whole:
                value: float = trial.suggest_int(dimension.name, int(low), int(high), log=log)
            else:
                value = trial.suggest_float(dimension.name, low, high, log=log)
            return [f"{dimension.name}={value!r}"]
        if not dimension.varies:
            return dimension.choices[0]
        labels = {" ".join(words): words for words in dimension.choices}
        return labels[str(trial.suggest_categorical(dimension.name, list(labels)))]

    def _add(self, trial: optuna.Trial) -> None:
        """Choose the values of a trial, and queue its jobs."""
        if self._options.search == "grid":
            assert self._space.combinations is not None
            overrides = self._space.combinations[trial.number]
        else:
            overrides = self._proposed(trial)
        trial.set_user_attr("overrides", overrides)
        added = self._trials[trial.number] = Trial(trial)
        for job in self._planned(trial.number, overrides):
            added.jobs[job.number] = job
            self._curves[job.number] = Curve(job.directory, self.objective.tag)
            self._jobs.append(job)
        if any(self._ledger.jobs.get(number, {}).get("state") == "pruned" for number in added.jobs):
            self._pause(added)
            added.num_passed = max(0, len(self._all_curves().get(trial.number, [])) - 1)

    def _proposed(self, trial: optuna.Trial) -> list[str]:
        """Return the overrides that Optuna's sampler proposes for a trial, and that no earlier trial has."""
        if self._space.combinations is None:
            return self._space.overrides(lambda each: self._suggested(trial, each, None))
        earlier = self._study.get_trials(deepcopy=False)[: trial.number]
        tried = {frozenset(each.user_attrs.get("overrides", [])) for each in earlier}
        untried = [words for each in self._space.combinations if (words := frozenset(each)) not in tried]

        def value(dimension: Dimension) -> list[str]:
            nonlocal untried
            allowed = [words for words in dimension.values if any(each.issuperset(words) for each in untried)]
            words = self._suggested(trial, dimension, allowed)
            untried = [each for each in untried if each.issuperset(words)]
            return words

        return self._space.overrides(value)

    def _planned(self, index: int, overrides: list[str]) -> list[PlannedJob]:
        """Return the planned jobs of trial number `index`, one for each seed."""
        words = [
            overrides if self._seed is None else [*overrides, f"seed={self._seed + k}"] for k in range(self._num_seeds)
        ]
        return [self._plan(index * self._num_seeds + k, each) for k, each in enumerate(words)]

    def _pause(self, trial: Trial) -> None:
        """Pause a trial: its jobs that are still in the queue are removed from the queue."""
        trial.is_paused = True
        waiting = [job for job in self._jobs if job.number in trial.jobs]
        for job in waiting:
            self._jobs.remove(job)
            trial.codes[job.number] = STOPPED

    def _finish(self, trial: Trial) -> None:
        """Record the result of a trial in the study, after all jobs of the trial have ended."""
        from optuna.trial import TrialState

        del self._trials[trial.optuna.number]
        codes = set(trial.codes.values())
        if codes == {DONE}:
            values = [trial.values[number] for number in sorted(trial.values)]
            trial.optuna.set_user_attr("values", values)
            self._study.tell(trial.optuna, statistics.fmean(values))
        elif codes & {CRASHED, REFUSED}:
            self._study.tell(trial.optuna, state=TrialState.FAIL)
        else:  # it diverged: Optuna treats a pruned trial as worse than any value
            self._study.tell(trial.optuna, state=TrialState.PRUNED)

    def _all_curves(self) -> dict[int, list[float]]:
        """Return a dictionary that maps the number of each trial to its curve.

        The curve is the list of the metric's values, one for each evaluation, averaged over the jobs of the trial.
        Trials without evaluations are left out.
        """
        by_trial: dict[int, list[list[float]]] = {}
        running = {number: curve.read() for number, curve in self._curves.items()}
        for number, values in {**self._final, **running}.items():
            if values:
                by_trial.setdefault(number // self._num_seeds, []).append(values)
        return {index: mean_curve(curves) for index, curves in by_trial.items()}

    def _passes(self, index: int, curves: dict[int, list[float]]) -> bool:
        """Return whether trial `index` passes its next evaluation, that is, whether the pruner lets the trial continue.

        The next evaluation is the one with the number `num_passed + 1`. A trial that was paused at this evaluation may
        pass it later, when the pruner has more results of other trials.
        """
        assert self._pruner is not None
        indices = list(curves)
        listed = [curves[each] for each in indices]
        return self._pruner.continues(self._trials[index].num_passed + 1, listed, indices.index(index))

    def _continue_paused(self) -> None:
        """Queue the stopped jobs of each paused trial again if the pruner now lets the trial continue.

        A trial whose run directories have been deleted has no evaluations that could be judged, and stays paused.
        """
        ended = [
            (index, trial)
            for index, trial in self._trials.items()
            if trial.is_paused and len(trial.codes) == self._num_seeds
        ]
        if not ended or self._pruner is None:
            return
        curves = self._all_curves()
        for index, trial in ended:
            can_continue = index in curves and all(code in (DONE, STOPPED) for code in trial.codes.values())
            if can_continue and self._passes(index, curves):
                trial.is_paused, trial.num_passed = False, trial.num_passed + 1
                stopped = [number for number, code in trial.codes.items() if code == STOPPED]
                for number in stopped:
                    del trial.codes[number]
                    self._curves[number] = Curve(trial.jobs[number].directory, self.objective.tag)
                    self._jobs.append(trial.jobs[number])


def open_study(path: Path, options: Engine, objective: Objective, space: str) -> optuna.Study:
    """Return the Optuna study in the file `path`, or a new study if there is none.

    Args:
        path: the file of the study.
        options: the options of the sweep.
        objective: the metric of the search.
        space: a description of the search space.

    Raises:
        ConfigError: if Optuna is not installed, the study is damaged, or it belongs to a search with another space,
            metric, `sweep.search` or `sweep.seeds`.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage
    except ImportError:
        remedy = "pip install optuna, or sweep.search=null to run all combinations of listed values"
        raise ConfigError("sweep.search", options.search, "it needs Optuna, which is not installed", remedy) from None
    optuna.logging.set_verbosity(logging.WARNING)
    remedy = "resume=never starts another sweep"
    try:
        _drop_incomplete_line(path)
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_NoLock()))  # type: ignore[arg-type]
        direction = "maximize" if objective.goal == "max" else "minimize"
        study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        known = study.user_attrs.get("space")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError("resume", "auto", f"{path} is damaged: {error}", remedy) from error
    # The number of a trial determines its combination in a grid, and the number of a job its trial and its seed.
    described = json.dumps([space, objective, options.search, options.seeds])
    why = f"the study {path} is of a search with another space, metric, sweep.search or sweep.seeds"
    earlier = json.dumps([space, objective])  # as version 0.1 described a search at first
    check(known in (None, described, earlier), "resume", "auto", why, f"take the change back; {remedy}")
    if known is None:
        study.set_user_attr("space", described)
    return study


class _NoLock:
    """A lock that does nothing, because the ledger has already locked the sweep.

    It replaces Optuna's lock file, which a killed process would leave behind.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None: ...


def _drop_incomplete_line(path: Path) -> None:
    """Remove the last line of the file `path` if a process was killed before it had written the whole line.

    A file with several hard links is replaced by a copy, because Optuna appends to it.
    """
    if path.exists() or path.is_symlink():
        content = read_regular(path, _LIMIT_BYTES)
        if not content.endswith(b"\n") or path.stat().st_nlink > 1:
            write_bytes(path, content[: content.rfind(b"\n") + 1])


def _sets_group(dimension: Dimension, groups: Collection[str]) -> bool:
    return any(key.partition("@")[0] in groups for key in dimension.keys)
