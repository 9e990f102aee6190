"""A search: the next combination of values depends on the results so far. Optuna proposes, and keeps the study.

A trial is one combination; it has a job for each seed. The study is the file `study.log` beside the ledger: the ledger
says what became of the jobs, the study what they were and what they were worth. A trial is complete only when all its
jobs have ended, so that a search that was killed repeats nothing and loses nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.errors import ConfigError, check
from runner.storage.safe_read import read_regular
from runner.sweep.engines.base import Engine
from runner.sweep.ledger import STUDY, Ledger
from runner.sweep.objective import Curve, Objective
from runner.sweep.pruning import PRUNERS, mean_curve
from runner.sweep.scheduler import CRASHED, DONE, REFUSED, STOPPED, JobSource, PlannedJob
from runner.sweep.space import Dimension

if TYPE_CHECKING:
    import optuna

_LIMIT_BYTES = 256_000_000

Plan = Callable[[int, list[str]], PlannedJob]


class Space:
    """The combinations of values that a search may try.

    Args:
        dimensions: what varies, and what does not; config groups decide which other keys exist.
        exists: returns whether a key exists in the config that overrides of groups compose.
        groups: the config groups.
    """

    def __init__(self, dimensions: list[Dimension], exists: Callable[[list[str], str], bool], groups: Collection[str]):
        self.dimensions = sorted(dimensions, key=lambda each: not _sets_group(each, groups))
        self._groups, self._exists = groups, exists

    def overrides(self, value: Callable[[Dimension], list[str]]) -> list[str]:
        """Return the overrides of one combination; a key that its config groups do not have is left out.

        Args:
            value: returns the overrides for one of the dimensions.
        """
        words: list[str] = []
        chosen: list[str] = []
        for each in self.dimensions:
            if _sets_group(each, self._groups):
                chosen += value(each)
            elif all(self._exists(chosen, key) for key in each.keys):
                words += value(each)
        return [*chosen, *words]

    def grid(self) -> Iterator[list[str]]:
        """Yield the overrides of all combinations that differ."""
        seen: set[tuple[str, ...]] = set()
        for combination in itertools.product(*(each.choices for each in self.dimensions)):
            by_name = {each.name: words for each, words in zip(self.dimensions, combination, strict=True)}
            overrides = self.overrides(lambda each, by_name=by_name: by_name[each.name])
            if tuple(overrides) not in seen:
                seen.add(tuple(overrides))
                yield overrides

    def __repr__(self) -> str:
        return json.dumps(self.dimensions)


class Trial:
    """One combination of values.

    Args:
        trial: Optuna's trial.
    """

    def __init__(self, trial: optuna.Trial):
        self.optuna = trial
        self.jobs: dict[int, PlannedJob] = {}
        self.codes: dict[int, int] = {}
        self.values: dict[int, float] = {}
        self.num_passed = 0
        """Number of evaluations after which it was decided that the trial continues."""
        self.is_paused = False


class SearchJobs(JobSource):
    """The jobs of a search.

    Args:
        space: the combinations.
        options: the options of the sweep.
        objective: what is compared.
        plan: returns a job by its number and overrides.
        seed: the seed of the first job of each trial.
        ledger: the ledger of the sweep.

    Raises:
        ConfigError: if Optuna is not installed, or the study in the sweep's directory is damaged or has another space.
    """

    def __init__(
        self, space: Space, options: Engine, objective: Objective, plan: Plan, seed: int | None, ledger: Ledger
    ):
        self._space, self._options, self.objective, self._plan = space, options, objective, plan
        self._seed, self._num_seeds, self._ledger = seed, options.seeds, ledger
        self._grid = list(space.grid()) if options.search == "grid" else []
        self._pruner = PRUNERS[options.prune](objective) if options.prune else None
        self._trials: dict[int, Trial] = {}
        self._jobs: deque[PlannedJob] = deque()
        self._curves: dict[int, Curve] = {}
        self._final: dict[int, list[float]] = {}
        self._study = open_study(ledger.path / STUDY, objective, repr(space))
        for frozen in self._study.get_trials(deepcopy=False):
            words = frozen.user_attrs.get("overrides", [])
            listed = isinstance(words, list) and all(isinstance(word, str) for word in words)
            check(listed, "resume", "auto", f"{ledger.path / STUDY} is damaged", "resume=never starts another sweep")
            if not frozen.state.is_finished():  # an earlier command was stopped before its end
                self._add(self._optuna_trial(frozen))
            elif self._pruner:
                for job in self._planned(frozen.number, words):
                    self._final[job.number] = Curve(job.directory, objective.tag).read()

    @property
    def num_trials(self) -> int:
        """The number of trials."""
        return len(self._grid) or self._options.trials

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
        trial.codes[number] = code
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
        """Tell the study which trials stay stopped, if no other trials will follow."""
        from optuna.trial import TrialState

        unfinished = [trial for trial in self._trials.values() if not trial.is_paused]
        if self._num_asked >= self.num_trials and not unfinished:
            for trial in self._trials.values():
                self._study.tell(trial.optuna, state=TrialState.PRUNED)
            self._trials.clear()

    def best(self) -> tuple[list[str], float] | None:
        """Return the overrides of the best trial, without its seeds, and its value; None if no trial is complete."""
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
        """Return a trial of an earlier command."""
        import optuna

        return optuna.Trial(self._study, frozen._trial_id)

    def _suggested(self, trial: optuna.Trial, dimension: Dimension) -> list[str]:
        """Return the overrides for the value that the sampler suggests.

        A value depends only on the number of the trial, the dimension and the results so far: a search that was killed
        after it had stored some of the values of a trial draws the others as it would have done.
        """
        import optuna

        index = self._space.dimensions.index(dimension)
        known = f"{self._options.sampler_seed} {trial.number} {index}"
        seed = int.from_bytes(hashlib.sha256(known.encode()).digest()[:4], "big")
        tpe = self._options.search == "tpe"
        samplers = optuna.samplers
        self._study.sampler = (
            samplers.TPESampler(seed=seed, multivariate=False) if tpe else samplers.RandomSampler(seed)
        )
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
        """Plan the jobs of a trial."""
        if self._grid:
            overrides = self._grid[trial.number]
        else:
            overrides = self._space.overrides(lambda each: self._suggested(trial, each))
        trial.set_user_attr("overrides", overrides)
        added = self._trials[trial.number] = Trial(trial)
        for job in self._planned(trial.number, overrides):
            added.jobs[job.number] = job
            self._curves[job.number] = Curve(job.directory, self.objective.tag)
            self._jobs.append(job)
        if any(self._ledger.jobs.get(number, {}).get("state") == "pruned" for number in added.jobs):
            self._pause(added)
            added.num_passed = max(0, len(self._all_curves().get(trial.number, [])) - 1)

    def _planned(self, index: int, overrides: list[str]) -> list[PlannedJob]:
        """Return the jobs of a trial."""
        words = [
            overrides if self._seed is None else [*overrides, f"seed={self._seed + k}"] for k in range(self._num_seeds)
        ]
        return [self._plan(index * self._num_seeds + k, each) for k, each in enumerate(words)]

    def _pause(self, trial: Trial) -> None:
        """Mark a trial as stopped, and its jobs that have not started, too."""
        trial.is_paused = True
        waiting = [job for job in self._jobs if job.number in trial.jobs]
        for job in waiting:
            self._jobs.remove(job)
            trial.codes[job.number] = STOPPED

    def _finish(self, trial: Trial) -> None:
        """Tell the study what a trial is worth whose jobs have all ended."""
        from optuna.trial import TrialState

        del self._trials[trial.optuna.number]
        codes = set(trial.codes.values())
        if codes == {DONE}:
            values = [trial.values[number] for number in sorted(trial.values)]
            trial.optuna.set_user_attr("values", values)
            self._study.tell(trial.optuna, statistics.fmean(values))
        elif codes & {CRASHED, REFUSED}:
            self._study.tell(trial.optuna, state=TrialState.FAIL)
        else:  # it diverged: worse than any value, which is what Optuna takes a pruned trial for
            self._study.tell(trial.optuna, state=TrialState.PRUNED)

    def _all_curves(self) -> dict[int, list[float]]:
        """Return the mean curve of each trial that has begun, by its number, including trials that are complete."""
        by_trial: dict[int, list[list[float]]] = {}
        running = {number: curve.read() for number, curve in self._curves.items()}
        for number, values in {**self._final, **running}.items():
            if values:
                by_trial.setdefault(number // self._num_seeds, []).append(values)
        return {index: mean_curve(curves) for index, curves in by_trial.items()}

    def _passes(self, index: int, curves: dict[int, list[float]]) -> bool:
        """Return whether a trial continues after its first evaluation for which that is not decided."""
        assert self._pruner is not None
        indices = list(curves)
        listed = [curves[each] for each in indices]
        return self._pruner.continues(self._trials[index].num_passed + 1, listed, indices.index(index))

    def _continue_paused(self) -> None:
        """Plan the jobs again of the trials that were stopped, and are promising now."""
        ended = [
            (index, trial)
            for index, trial in self._trials.items()
            if trial.is_paused and len(trial.codes) == self._num_seeds
        ]
        if not ended or self._pruner is None:
            return
        curves = self._all_curves()
        for index, trial in ended:
            if all(code in (DONE, STOPPED) for code in trial.codes.values()) and self._passes(index, curves):
                trial.is_paused, trial.num_passed = False, trial.num_passed + 1
                stopped = [number for number, code in trial.codes.items() if code == STOPPED]
                for number in stopped:
                    del trial.codes[number]
                    self._curves[number] = Curve(trial.jobs[number].directory, self.objective.tag)
                    self._jobs.append(trial.jobs[number])


def open_study(path: Path, objective: Objective, space: str) -> optuna.Study:
    """Return the study in the file `path`, or a new one.

    Raises:
        ConfigError: if Optuna is not installed, or the study is damaged or has another space.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage
    except ImportError:
        remedy = "pip install -e '.[search]'"
        raise ConfigError("sweep.search", "tpe", "Optuna is not installed", remedy) from None
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
    described = json.dumps([space, objective])
    check(known in (None, described), "resume", "auto", f"the study {path} searches another space, or metric", remedy)
    if known is None:
        study.set_user_attr("space", described)
    return study


class _NoLock:
    """In place of Optuna's lock file, which a killed process leaves behind: the ledger has locked the sweep."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None: ...


def _drop_incomplete_line(path: Path) -> None:
    """Remove the last line of a file if a process was killed while writing it."""
    if path.exists() or path.is_symlink():
        content = read_regular(path, _LIMIT_BYTES)
        if content and not content.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


def _sets_group(dimension: Dimension, groups: Collection[str]) -> bool:
    return any(key.partition("@")[0] in groups for key in dimension.keys)
