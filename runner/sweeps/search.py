"""A search, which chooses the combinations of values that a sweep tries, one after another.

A trial is one combination of values, with one job for each seed. The ledger records the state of each job. An Optuna
study, the file `study.log` next to the ledger, records the values and the result of each trial. The result is recorded
only when all jobs of the trial have ended, so that a killed search can be resumed without repeating jobs or losing
results.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState

from runner.config.errors import ConfigError, check
from runner.storage.files import read_regular, write_bytes
from runner.sweeps.engines.base import Engine, Job
from runner.sweeps.ledger import STUDY, Ledger
from runner.sweeps.objectives import Objective
from runner.sweeps.sampling import TPE_OPTIONS, proposed
from runner.sweeps.scheduler import JobSource
from runner.sweeps.search_space import Space
from runner.system.console import CRASHED, DONE, INTERRUPTED, REFUSED, STOPPED
from runner.tracking.event_file import EventReader

_LIMIT_BYTES = 256_000_000
_REMEDY = "resume=never starts another sweep"


@dataclass
class Trial:
    """A trial of a search: one combination of values, with one job for each seed."""

    optuna: optuna.Trial
    jobs: dict[int, Job]
    events: list[EventReader]
    num_reported: int  # how many of its evaluations the pruner has seen
    codes: dict[int, int] = field(default_factory=dict)
    values: list[list[float]] = field(default_factory=list)  # of each job, for each objective
    is_paused: bool = False


class Search(JobSource):
    """The jobs of a search. `open` must be called before the first job is taken.

    Args:
        space: the combinations that the search may try.
        options: the options of the sweep.
        objectives: the metrics by which trials are compared.
        seed: the seed of the first job of each trial, from which the others count up; None: it is not set.
        plan: returns the job with a number and overrides.
    """

    learns = True

    def __init__(
        self,
        space: Space,
        options: Engine,
        objectives: Sequence[Objective],
        seed: int | None,
        plan: Callable[[int, list[str]], Job],
    ):
        super().__init__(iter(()), 0, objectives)
        self.options, self._space, self._seed, self._plan = options, space, seed, plan
        self._trials: dict[int, Trial] = {}
        self._queue: deque[Job] = deque()
        self._may_promote = True
        """Whether the results have changed since the pruner judged the paused trials."""
        num_combinations = options.trials if space.combinations is None else len(space.combinations)
        self.num_planned = num_combinations if options.search == "grid" else min(options.trials, num_combinations)
        """The number of trials that the options ask for. No combination is tried twice."""

    def open(self, ledger: Ledger) -> None:
        """Open the study in the directory of the sweep, and queue the jobs of unfinished trials.

        Raises:
            ConfigError: if the study is damaged or belongs to a search with another space, metric, `sweep.search` or
                `sweep.seeds`.
        """
        self._ledger, self._study = ledger, self._open_study(ledger.path)
        for frozen in self._study.get_trials(deepcopy=False):
            words = frozen.user_attrs.get("overrides", [])  # those of the best one are printed and written
            check(self._space.contains(words), "resume", "auto", f"{ledger.path / STUDY} is damaged", _REMEDY)
            self._has_measured |= frozen.state == TrialState.COMPLETE
            if not frozen.state.is_finished():  # an earlier command was stopped before its end
                self._add(optuna.Trial(self._study, frozen._trial_id), frozen.last_step or 0)

    @property
    def num_trials(self) -> int:
        """The number of trials of the search, including those of earlier commands; a trial has one job per seed."""
        return max(self.num_planned, self._num_asked)

    def __len__(self) -> int:
        return self.num_trials * self.options.seeds

    def is_complete(self, num_settled: int) -> bool:
        return self._num_asked >= self.num_trials and not self._trials

    def next(self) -> Job | None:
        if self._may_promote:
            self._promote()
        if not self._queue and self._num_asked < self.num_trials:
            self._add(self._study.ask())
        return self._queue.popleft() if self._queue else None

    def tell(self, number: int, code: int, result: dict[str, Any]) -> None:
        trial = self._trials.get(number // self.options.seeds)
        if trial is None:
            return
        self._report(trial)
        trial.codes[number] = STOPPED if code == INTERRUPTED else code
        if code == DONE:
            trial.values.append(self._values(number, result))
        if len(trial.codes) == self.options.seeds and STOPPED not in trial.codes.values():
            self._finish(trial)
        self._may_promote = True

    def unpromising(self, running: Collection[int]) -> list[int]:
        for trial in self._trials.values():
            self._report(trial)
        return [number for number in running if self._trials[number // self.options.seeds].is_paused]

    def close(self) -> None:
        """Record paused trials as pruned in the study, if all other trials have ended and no new trial will start."""
        unfinished = [trial for trial in self._trials.values() if not trial.is_paused]
        if self._num_asked >= self.num_trials and not unfinished:
            for trial in self._trials.values():
                self._study.tell(trial.optuna, state=TrialState.PRUNED)
            self._trials.clear()

    def best(self) -> list[tuple[list[str], list[float]]]:
        """Return the overrides, without seeds, and the mean values of the best trial; with several objectives, of those
        on the Pareto front, sorted by the first one. The list is empty if none is done.
        """
        sign = -1 if self.objectives[0].goal == "max" else 1
        found = sorted(self._study.best_trials, key=lambda trial: sign * trial.values[0])
        found = found if len(self.objectives) > 1 else found[:1]
        return [(trial.user_attrs["overrides"], trial.values) for trial in found]

    @property
    def _num_asked(self) -> int:
        return len(self._study.get_trials(deepcopy=False))

    def _add(self, trial: optuna.Trial, num_reported: int = 0) -> None:
        """Choose the values of a new trial, or of one that an earlier command began, and queue its jobs."""
        if self.options.search == "grid":
            assert self._space.combinations is not None
            overrides = self._space.combinations[trial.number]
        else:
            overrides = proposed(self._study, trial, self._space, self.options)
        trial.set_user_attr("overrides", overrides)
        jobs: dict[int, Job] = {}
        for k in range(self.options.seeds):
            number = trial.number * self.options.seeds + k
            words = overrides if self._seed is None else [*overrides, f"seed={self._seed + k}"]
            jobs[number] = self._plan(number, words)
        self._queue += jobs.values()
        events = [EventReader(job.directory, [self.objectives[0].tag], finite=False) for job in jobs.values()]
        added = self._trials[trial.number] = Trial(trial, jobs, events, num_reported)
        if any(self._ledger.jobs.get(number, {}).get("state") == "pruned" for number in jobs):
            self._pause(added)

    def _report(self, trial: Trial) -> None:
        """Report the new evaluations of a trial to the pruner, and pause the trial if it is worse than others.

        An evaluation counts as soon as all jobs of the trial that have evaluated at all have reached it; its value is
        the mean over these jobs. One in which the metric is not defined counts, but is not reported.
        """
        if self.options.prune is None or trial.is_paused:
            return
        curves = [events.read().get(self.objectives[0].tag) for events in trial.events]
        values = [[value for _, value in sorted(curve.items())] for curve in curves if curve]
        for evaluated in list(zip(*values, strict=False))[trial.num_reported :]:
            trial.num_reported += 1
            if not math.isfinite(value := statistics.fmean(evaluated)):
                continue
            trial.optuna.report(value, trial.num_reported)
            self._may_promote = True
            if trial.optuna.should_prune():
                self._pause(trial)
                return

    def _pause(self, trial: Trial) -> None:
        """Pause a trial: its jobs that are still in the queue are removed from the queue."""
        trial.is_paused = True
        for job in [job for job in self._queue if job.number in trial.jobs]:
            self._queue.remove(job)
            trial.codes[job.number] = STOPPED

    def _promote(self) -> None:
        """Queue the stopped jobs of each paused trial again if the pruner, with more results, lets it continue."""
        self._may_promote = False
        stopped = [each for each in self._trials.values() if each.is_paused and len(each.codes) == self.options.seeds]
        paused = [each for each in stopped if {*each.codes.values()} <= {DONE, STOPPED}]
        if not paused:
            return
        study = optuna.create_study(direction=self._study.direction)  # in memory, because pruners write what they judge
        study.add_trials(self._study.get_trials(deepcopy=False))
        for trial in paused:
            frozen = study.get_trials(deepcopy=False)[trial.optuna.number]
            rungs = [key for key in frozen.system_attrs if key.startswith("completed_rung_")]
            for key in rungs[-1:]:  # successive halving would judge only the next rung, which the trial has not reached
                del frozen.system_attrs[key]
            if not self._study.pruner.prune(study, frozen):
                trial.is_paused = False
                for job in trial.jobs.values():
                    if trial.codes[job.number] == STOPPED:
                        del trial.codes[job.number]
                        self._queue.append(job)

    def _finish(self, trial: Trial) -> None:
        """Record the result of a trial in the study, after all jobs of the trial have ended."""
        del self._trials[trial.optuna.number]
        codes = set(trial.codes.values())
        means = [statistics.fmean(values) for values in zip(*trial.values, strict=True)]
        if codes == {DONE} and all(map(math.isfinite, means)):
            self._study.tell(trial.optuna, means)
        elif codes & {CRASHED, REFUSED}:
            self._study.tell(trial.optuna, state=TrialState.FAIL)
        else:  # it diverged, or has no value: Optuna treats a pruned trial as worse than any value
            self._study.tell(trial.optuna, state=TrialState.PRUNED)

    def _open_study(self, directory: Path) -> optuna.Study:
        """Return the study of this search in the directory of a sweep, or a new study if there is none."""
        path, options = directory / STUDY, self.options
        optuna.logging.set_verbosity(logging.WARNING)
        pruners = {
            None: optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(n_startup_trials=4),
            "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
        }
        # The ledger has locked the sweep. A process that is killed would leave Optuna's lock file behind.
        no_lock: Any = SimpleNamespace(acquire=lambda: True, release=lambda: None)
        try:
            if path.exists() or path.is_symlink():
                content = read_regular(path, _LIMIT_BYTES)
                # Optuna appends to the file: without a line that a killed process left incomplete, and to a copy, as
                # there may be other hard links to it.
                write_bytes(path, content[: content.rfind(b"\n") + 1])
            study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path), no_lock)),
                study_name="sweep",
                directions=["maximize" if each.goal == "max" else "minimize" for each in self.objectives],
                load_if_exists=True,
                pruner=pruners[options.prune],
            )
            known = study.user_attrs.get("space")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ConfigError("resume", "auto", f"{path} is damaged: {error}", _REMEDY) from error
        # The number of a trial determines its combination in a grid, and the number of a job its trial and its seed.
        described = json.dumps([repr(self._space), *self.objectives, options.search, options.seeds])
        why = f"the study {path} is of a search with another space, metric, sweep.search or sweep.seeds"
        check(known in (None, described), "resume", "auto", why, f"take the change back; {_REMEDY}")
        if known is None:
            study.set_user_attr("space", described)
            sampler = {"search": options.search, "seed": options.sampler_seed, "optuna": optuna.__version__}
            study.set_user_attr("sampler", sampler | (TPE_OPTIONS if options.search == "tpe" else {}))
        return study
