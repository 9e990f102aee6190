"""Tests of searches: which trials run, what the study records, and that a killed search loses nothing."""

import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
import pytest
from helpers.fake_pool import FakePool
from optuna.storages.journal import JournalFileBackend, JournalStorage

from runner.config.errors import ConfigError
from runner.storage.ledger_file import read_ledger
from runner.sweeps.display import Display
from runner.sweeps.engines.base import Ended, Job
from runner.sweeps.engines.local import Local
from runner.sweeps.ledger import STUDY, Ledger, console_file
from runner.sweeps.objectives import Objective
from runner.sweeps.scheduler import Scheduler
from runner.sweeps.search import Search
from runner.sweeps.search_space import Dimension, Interval, Space
from runner.system.signals import StopRequest
from runner.tracking.event_file import EventFile, points

LOSS = Objective("eval/loss", "min", best=True)
TWO = (Objective("eval/loss", "min", best=False), Objective("time/samples_per_second", "max", best=False))
OPTIMIZER = Dimension("optimizer", ("optimizer",), [["optimizer=sgd"], ["optimizer=adam"]])
LR = Dimension("lr", ("lr",), [[]], Interval(1e-4, 1.0, log=True))
MOMENTUM = Dimension("optimizer.momentum", ("optimizer.momentum",), [[]], Interval(0.0, 0.99))
WIDTH = Dimension("width", ("width",), [[]], Interval(2, 8, whole=True))
RATE = Dimension("lr", ("lr",), [["lr=0.01"], ["lr=0.03"]])
EPOCHS = Dimension("epochs", ("epochs",), [["epochs=2"]])
LISTED_MOMENTUM = MOMENTUM._replace(choices=[["optimizer.momentum=0"], ["optimizer.momentum=0.9"]], interval=None)


def has_key(groups: list[str], key: str) -> bool:
    """Only the option `optimizer=sgd` has a momentum; all other keys are always there."""
    return key != "optimizer.momentum" or groups == ["optimizer=sgd"]


def space(*dimensions: Dimension) -> Space:
    return Space(list(dimensions or (LR, OPTIMIZER, MOMENTUM, WIDTH, EPOCHS)), has_key, {"optimizer"})


def values(overrides: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in (text.partition("=") for text in overrides)}


def loss(overrides: list[str]) -> float:
    """Return a loss that is lowest at a learning rate of 0.03; momentum, the seed and Adam increase it."""
    typed = values(overrides)
    shift = float(typed.get("optimizer.momentum", 0.5)) + 0.01 * int(typed.get("seed", 0))
    return abs(math.log10(float(typed["lr"])) - math.log10(0.03)) + shift + (typed["optimizer"] == "adam")


class FakeTrainingPool(FakePool):
    """A fake pool in which the function `loss` computes the loss of each job from the overrides of the job."""

    def __init__(self, path: Path, slots: int = 1, codes: dict[int, list[int | None]] | None = None):
        super().__init__(codes or {}, slots)
        self.path = path
        self.overrides: dict[int, list[str]] = {}
        self.done: list[int] = []

    def has_room(self) -> bool:
        return len(self.running) < self.slots

    def submit(self, job: Job) -> str | None:
        self.overrides[job.number] = job.arguments
        return super().submit(job)

    def wait(self, seconds: float) -> list[Ended]:
        ended = super().wait(seconds)
        for each in ended:
            self.done += [each.number] if each.code == 0 else []
            self.write(each.number, loss(self.overrides[each.number]))
        return ended

    def write(self, number: int, value: float) -> None:
        directory = self.path / f"{number:03d}"
        directory.mkdir(exist_ok=True)
        best = {"metric": "eval/loss", "value": value, "step": 3}
        result = {"status": "done", "steps": 3, "best": best, "metrics": {"eval/loss": value}, **self.more(number)}
        (directory / "result.json").write_text(json.dumps(result))

    def more(self, number: int) -> dict[str, Any]:
        return {}


def rate(overrides: list[str]) -> float:
    """Return a throughput that grows with the learning rate, against the loss above 0.03, and with the width."""
    return 100 * float(values(overrides)["lr"]) + float(values(overrides)["width"]) // 2


class FakeTimedPool(FakeTrainingPool):
    """A fake pool in which the jobs also have a throughput; that of job 2 was not measured."""

    def more(self, number: int) -> dict[str, Any]:
        return {"samples_per_second": rate(self.overrides[number]) if number != 2 else 0}


class FakeEvaluatingPool(FakeTrainingPool):
    """A fake pool whose jobs evaluate once in each call of `wait`, and end after nine evaluations."""

    def __init__(self, path: Path, slots: int, loss_after: Callable[[int, int], float], earlier: Any = ()):
        super().__init__(path, slots)
        self.loss_after = loss_after
        self.evaluations: dict[int, int] = dict(earlier)

    def wait(self, seconds: float) -> list[Ended]:
        ended = []
        for number in list(self.running):
            directory = self.path / f"{number:03d}"
            directory.mkdir(exist_ok=True)
            if number in self.stopped:
                code = 75
            else:
                self.evaluations[number] = i = self.evaluations.get(number, 0) + 1
                events = EventFile(directory, i)
                events.add(points({"eval/loss": self.loss_after(number, i), "eval/other": -1.0}), i)
                events.close()
                code = 0 if i == 9 else None
            if code is not None:
                self.running.remove(number)
                self.write(number, self.loss_after(number, 9))
                ended.append(Ended(number, code))
        return ended


@contextmanager
def open_search(root: Path, options: Local, what: Space | None = None, *objectives: Objective) -> Iterator[Search]:
    """Open the search of the unfinished sweep in `root`, or of a new sweep if there is none."""

    def plan(number: int, overrides: list[str]) -> Job:
        words = [text for text in overrides if text != "epochs=2"]
        path = search._ledger.path
        about = {"overrides": words, "directory": path / f"{number:03d}", "config_hash": f"{words}"}
        return Job(number, words, console_file(path, number), **about)

    search = Search(what or space(), options, objectives or [LOSS], 7 if options.seeds > 1 else None, plan)
    with Ledger(["lr=…"], root, "auto", is_search=True) as ledger:
        search.open(ledger)
        yield search


def run(source: Search, pool: FakePool, options: Local) -> list[int]:
    ledger = source._ledger
    display = Display(len(source), ["lr"])
    codes = Scheduler(source, pool, ledger, options, display).run(StopRequest())
    source.close()
    ledger.end(source.is_complete(len(ledger.settled_states)))
    display.summary()
    return codes


def searched(
    root: Path, options: Local, what: Space | None = None, slots: int = 1, **given: Any
) -> tuple[Search, Any, list[int]]:
    """Run a search, in a `FakeEvaluatingPool` if `loss_after` is given, and return it, its pool and its exit codes."""
    with open_search(root, options, what) as source:
        kind = FakeEvaluatingPool if "loss_after" in given else FakeTrainingPool
        pool = kind(source._ledger.path, slots, **given)
        return source, pool, run(source, pool, options)


def begin(source: Search) -> Path:
    """Begin the first job, and return the path of the study."""
    source.next()
    source._ledger.update(0, config_hash="…", state="running")
    (source._ledger.path / "000").mkdir()
    return source._ledger.path / STUDY


def study(source: Search) -> list[tuple[str, dict[str, Any], Any]]:
    """Return the state, the parameters and the value or, of several metrics, the values of each trial."""
    several = len(source.objectives) > 1
    return [
        (t.state.name, t.params, t.values if several else t.value) for t in source._study.get_trials(deepcopy=False)
    ]


@pytest.mark.parametrize(("search", "slots"), [("tpe", 1), ("random", 3)])
def test_a_search_finds_better_values_and_returns_the_best(search, slots, tmp_path):
    source, pool, codes = searched(tmp_path, Local(search=search, trials=40), slots=slots)
    assert codes == [0] * 40
    assert pool.started == list(range(40))
    losses = [loss(pool.overrides[number]) for number in range(40)]
    assert [value for _, _, value in study(source)] == losses
    [(best, value)] = source.best()
    assert value == [min(losses)] == [loss(best)]
    assert "epochs=2" in best
    for _, params, _ in study(source):
        assert ("optimizer.momentum" in params) == (params["optimizer"] == "optimizer=sgd"), "only sgd has one"
        assert 1e-4 <= params["lr"] <= 1
        assert params["width"] in range(2, 9)
    assert source._ledger.complete
    if search == "tpe":
        assert statistics.median(losses[30:]) < statistics.median(losses[:10])


def test_a_grid_leaves_out_keys_that_the_chosen_option_does_not_have(tmp_path):
    lr = Dimension("lr", ("lr",), [["lr=0.1"]])
    source, pool, _ = searched(tmp_path, Local(search="grid"), space(lr, OPTIMIZER, LISTED_MOMENTUM))
    best = ["optimizer=sgd", "lr=0.1", "optimizer.momentum=0"]
    others = [["optimizer=sgd", "lr=0.1", "optimizer.momentum=0.9"], ["optimizer=adam", "lr=0.1"]]
    assert [*pool.overrides.values()] == [best, *others]
    assert source.best() == [(best, [loss(best)])]


def test_a_key_that_is_typed_with_a_plus_is_added_to_the_config():
    gravity = Dimension("+env.options.gravity", ("env.options.gravity",), [[]], Interval(8, 9, whole=True))
    absent = Dimension("model.depth", ("model.depth",), [["model.depth=3"], ["model.depth=4"]])
    found = Space([absent, gravity], lambda groups, key: False, ()).combinations
    assert found == [["+env.options.gravity=8"], ["+env.options.gravity=9"]]


def test_the_value_of_a_trial_is_the_mean_over_its_seeds(tmp_path):
    source, pool, codes = searched(tmp_path, Local(search="random", trials=3, seeds=3), slots=2)
    assert codes == [0] * 9
    for trial, (_, _, value) in enumerate(study(source)):
        words = [pool.overrides[3 * trial + k] for k in range(3)]
        assert [values(each)["seed"] for each in words] == ["7", "8", "9"]
        assert value == pytest.approx(statistics.fmean(map(loss, words)), abs=1e-12)
        assert len({values(each)["lr"] for each in words}) == 1


def test_failed_trials_have_no_value_and_an_interrupted_one_is_resumed(tmp_path):
    options = Local(search="random", trials=5)
    source, _, codes = searched(tmp_path, options, codes={0: [1], 1: [3], 2: [2], 3: [130]})
    assert codes == [1, 3, 2, 130, 0]
    assert [state for state, _, _ in study(source)] == ["FAIL", "PRUNED", "FAIL", "RUNNING", "COMPLETE"]
    assert not source._ledger.complete
    source, pool, codes = searched(tmp_path, options)
    assert (pool.started, codes) == ([3], [0])
    assert [state for state, _, _ in study(source)][3:] == ["COMPLETE", "COMPLETE"]


def test_a_search_that_a_failure_has_stopped_goes_on_with_all_other_trials(tmp_path):
    options = Local(search="random", trials=6, fail_fast=True)
    source, first, codes = searched(tmp_path, options, slots=3, codes={1: [1]})
    assert (first.started, codes) == ([0, 1, 2, 3], [0, 1, 75, 75]), "two were running, and two had not begun"
    assert [state for state, _, _ in study(source)] == ["COMPLETE", "FAIL", "RUNNING", "RUNNING"]
    source, second, codes = searched(tmp_path, options, slots=3)
    assert (second.started, codes) == ([2, 3, 4, 5], [0] * 4)
    assert [second.overrides[number] for number in (2, 3)] == [first.overrides[number] for number in (2, 3)]
    assert [state for state, _, _ in study(source)] == ["COMPLETE", "FAIL", *["COMPLETE"] * 4]


class SimulatedKill(BaseException):
    """Raised at a write of the ledger or the study, to end the command as SIGKILL would."""


class Writes:
    """Counts the writes of the ledger and the study; write number `fatal` raises `SimulatedKill`.

    Nothing of the ledger is written then, and a part of the study.
    """

    count, fatal = 0, 0

    def is_fatal(self) -> bool:
        self.count += 1
        return self.count == self.fatal


@pytest.fixture
def writes(monkeypatch) -> Writes:
    from runner.sweeps import ledger

    writes, write_text, append_logs = Writes(), ledger.write_text, JournalFileBackend.append_logs

    def write(path: Path, text: str) -> None:
        if writes.is_fatal():
            raise SimulatedKill
        write_text(path, text)

    def append(self: Any, logs: list[dict[str, Any]]) -> None:
        if writes.is_fatal():
            with Path(self._file_path).open("a") as file:
                file.write(json.dumps(logs[0])[:-9])
            raise SimulatedKill
        append_logs(self, logs)

    monkeypatch.setattr(ledger, "write_text", write)
    monkeypatch.setattr(JournalFileBackend, "append_logs", append)
    return writes


@pytest.mark.parametrize(("seeds", "finite"), [(2, False), (1, True)])
def test_resume_of_a_search_killed_at_any_write_gives_the_same_trials(seeds, finite, tmp_path, writes):
    """With one job at a time, the trials have the same parameters and values as in a search that is not killed.

    After each kill, at most one job that had ended runs again.
    """
    options = Local(search="tpe", trials=12, seeds=seeds)  # TPE draws the first ten at random
    what, objectives, kind = None, (LOSS,), FakeTrainingPool
    if finite:
        what, objectives, kind = space(RATE, OPTIMIZER, WIDTH), TWO, FakeTimedPool
    with open_search(tmp_path / "undisturbed", options, what, *objectives) as source:
        run(source, kind(source._ledger.path), options)
        wanted = study(source)
    assert [state for state, _, _ in wanted] == ["COMPLETE"] * 2 + ["PRUNED" if finite else "COMPLETE"] + [
        "COMPLETE"
    ] * 9
    for number in range(2, writes.count, 23):
        root, done, alive = tmp_path / f"killed at {number}", [], [True]
        writes.count, writes.fatal = 0, number
        while alive:
            with suppress(SimulatedKill), open_search(root, options, what, *objectives) as source:
                pool = kind(source._ledger.path)
                try:
                    run(source, pool, options)
                finally:
                    done += [n for n in pool.done if (source._ledger.path / f"{n:03d}" / "result.json").exists()]
                assert study(source) == wanted, number
                alive.clear()
        assert len(done) - len(set(done)) <= 1, "a job ended, and the command was killed before it wrote that down"
        assert set(done) == set(range(12 * seeds))


def test_a_study_with_another_hard_link_is_copied_before_it_is_continued(tmp_path):
    options, other = Local(search="random", trials=2), tmp_path / "backup.log"
    with open_search(tmp_path, options) as source:
        path = begin(source)
    other.hardlink_to(path)
    before = other.read_bytes()
    with open_search(tmp_path, options) as source:
        source.next()
        source.next()
        assert path.read_bytes().startswith(before)
        assert len(path.read_bytes()) > len(before)
    assert other.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "dimensions", "goal"),
    [({}, [LR, OPTIMIZER], "min"), ({}, [], "max"), ({"search": "tpe"}, [], "min"), ({"seeds": 2}, [], "min")],
)
def test_a_study_of_another_search_is_refused(options, dimensions, goal, tmp_path):
    with open_search(tmp_path, Local(search="random", trials=2)) as source:
        begin(source)
    other = Local(**{"search": "random", "trials": 2, **options})
    refused = pytest.raises(ConfigError, match=r"another space, metric, sweep\.search or sweep\.seeds")
    with refused as refusal, open_search(tmp_path, other, space(*dimensions), LOSS._replace(goal=goal)):
        pass
    assert (refusal.value.key, refusal.value.got) == ("resume", "auto")


@pytest.mark.parametrize("words", [["hydra.run.dir=/elsewhere"], ["lr=9"], ["lr=0.5\n"], [7], "words", None], ids=repr)
def test_a_damaged_study_or_one_with_values_from_outside_the_space_is_refused(words, tmp_path):
    """Those of the best trial would be printed as a command, and written as an experiment."""
    options = Local(search="random", trials=2)
    with open_search(tmp_path, options) as source:
        path = begin(source)
        next(iter(source._trials.values())).optuna.set_user_attr("overrides", words)
    if words is None:
        path.write_text('{"op_code": 99}\n[]\n')
    with pytest.raises(ConfigError, match="damaged"), open_search(tmp_path, options):
        pass


@pytest.mark.parametrize(("trials", "started"), [(5, [3, 4]), (2, [])])
def test_a_finished_search_continues_with_more_trials(trials, started, tmp_path, capsys):
    first, _, _ = searched(tmp_path, Local(search="random", trials=3))
    source, pool, codes = searched(tmp_path, Local(search="random", trials=trials, sampler_seed=7))
    assert source._ledger.path == first._ledger.path
    assert (pool.started, codes) == (started, [0] * len(started))
    assert f"\n{max(3, trials)} of {max(3, trials)} jobs done\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="another space"), open_search(tmp_path, Local(search="tpe")):
        pass
    assert read_ledger(source._ledger.path)["complete"], "the refused search has not changed it"


@pytest.mark.parametrize(("search", "slots", "killed"), [("tpe", 3, False), ("tpe", 1, True), ("random", 3, True)])
def test_a_search_of_a_finite_space_tries_each_combination_once(search, slots, killed, tmp_path):
    wanted = {
        frozenset({f"width={width}", "lr=0.03", *words})
        for width in range(2, 9)
        for words in (("optimizer=adam",), *(("optimizer=sgd", f"optimizer.momentum={m}") for m in (0, 0.9)))
    }
    what = space(WIDTH, OPTIMIZER, LISTED_MOMENTUM, Dimension("lr", ("lr",), [["lr=0.03"]]))
    tried: list[frozenset[str]] = []
    for trials in (10, 40) if killed else (40,):
        source, pool, _ = searched(tmp_path, Local(search=search, trials=trials), what, slots)
        tried += map(frozenset, pool.overrides.values())
        assert source._ledger.complete
        assert len(source) == min(trials, 21)
    assert len(tried) == len(wanted) == 21
    assert set(tried) == wanted


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_lists_and_dictionaries_are_tried_as_typed_and_read_from_the_study_by_everybody(search, tmp_path):
    layers = Dimension("model.layers", ("model.layers",), [[f"model.layers={x}"] for x in ("[8]", "[8,16]", "null")])
    data = Dimension("+data", ("data",), [["+data={size:8}"], ["+data={size:9,inputs:[a,b]}"]])
    what, tried = space(RATE, OPTIMIZER, layers, data), []
    for trials in (12, 24):  # the second command continues the study of the first
        source, pool, _ = searched(tmp_path, Local(search=search, trials=trials), what)
        tried += [tuple(sorted(words)) for words in pool.overrides.values()]
    every = itertools.product(*(each.choices for each in (data, RATE, layers, OPTIMIZER)))
    assert sorted(tried) == sorted(tuple(sorted(itertools.chain(*words))) for words in every)
    backend = JournalFileBackend(str(source._ledger.path / STUDY))
    read = optuna.load_study(study_name="sweep", storage=JournalStorage(backend))
    [(best, _)] = source.best()
    assert sorted(read.best_trial.params.values()) == sorted(best)
    assert [sorted(each.params.values()) for each in read.trials] == [[*words] for words in tried]


def test_halving_stops_worse_trials_and_completes_the_best(tmp_path):
    """Each trial is worse than those before it: three of nine pass their first evaluation, and one its third."""
    options = Local(search="random", trials=9, prune="halving")
    source, pool, codes = searched(tmp_path, options, slots=3, loss_after=lambda number, i: number + 1 / i)
    assert codes == [0] * 9, "to be stopped is no failure"
    assert [state for state, _, _ in study(source)] == ["COMPLETE"] + ["PRUNED"] * 8
    assert {source._ledger.jobs[number]["state"] for number in range(1, 9)} == {"pruned"}
    assert sum(pool.evaluations.values()) <= 9 + 2 * 4 + 6 * 2, "a job may evaluate once more before it stops"
    assert source._ledger.complete


def test_a_pruned_trial_is_promoted_when_the_others_turn_out_worse(tmp_path):
    """Trial 1 is stopped as the worse of two trials, and continues later as one of the two best of six."""
    options, first = Local(search="random", trials=6, prune="halving"), {0: 1.0, 1: 2.0}
    source, pool, _ = searched(tmp_path, options, loss_after=lambda number, i: first.get(number, 10.0 + number))
    assert pool.started.count(1) == 2, "started again"
    assert pool.evaluations[1] >= 3
    assert study(source)[0][0] == "COMPLETE"


def test_the_median_rule_compares_with_four_others_and_pruned_trials_stay_pruned_in_a_resume(tmp_path):
    """One of their run directories, which contain their evaluations, was deleted."""
    options, stop = Local(search="random", trials=8, prune="median"), StopRequest()

    def loss_after(number: int, i: int) -> float:
        stop.received = "SIGTERM" if number == 6 else ""
        return float(number)

    with open_search(tmp_path, options) as source:
        pool = FakeEvaluatingPool(source._ledger.path, 1, loss_after)
        Scheduler(source, pool, source._ledger, options, Display(8, ["lr"])).run(stop)
        source.close()
    assert [pool.evaluations[number] for number in range(6)] == [9] * 4 + [1] * 2
    assert [source._ledger.jobs[number]["state"] for number in (4, 5)] == ["pruned"] * 2
    shutil.rmtree(source._ledger.path / "004")
    source, again, _ = searched(tmp_path, options, loss_after=loss_after, earlier=pool.evaluations)
    assert set(again.started) <= {6, 7}
    assert [state for state, _, _ in study(source)] == ["COMPLETE"] * 4 + ["PRUNED"] * 4


def test_an_evaluation_without_a_value_counts_when_trials_are_compared(tmp_path):
    """The best trial is not defined at its first evaluation; its second one, 0.5, is compared with second ones, 0.6."""

    def loss_after(number: int, i: int) -> float:
        first, later = (math.nan, 0.5) if number == 5 else (0.1, 0.6)
        return first if i == 1 else later

    options = Local(search="random", trials=6, prune="median")
    source, pool, _ = searched(tmp_path, options, loss_after=loss_after)
    assert pool.evaluations[5] == 9
    assert [state for state, _, _ in study(source)] == ["COMPLETE"] * 6
    assert source._study.best_trial.number == 5
    assert sorted(source._study.best_trial.intermediate_values) == [*range(2, 10)]


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_the_study_says_how_its_trials_are_proposed(search, tmp_path):
    source, _, _ = searched(tmp_path, Local(search=search, trials=1, sampler_seed=3))
    relied_on = {"multivariate": False, "constant_liar": True} if search == "tpe" else {}
    assert source._study.user_attrs["sampler"] == {
        "search": search,
        "seed": 3,
        "optuna": version("optuna"),
        **relied_on,
    }


@pytest.mark.parametrize(("search", "slots"), [("tpe", 3), ("random", 1)])
def test_a_search_by_several_metrics_returns_the_trials_that_no_other_beats(search, slots, tmp_path, caplog):
    options, points = Local(search=search, trials=9), {}
    for trials in (9, 25):  # the search goes on
        options = Local(search=search, trials=trials)
        with open_search(tmp_path, options, None, *TWO) as source:
            pool = FakeTimedPool(source._ledger.path, slots)
            assert run(source, pool, options) == [0] * len(pool.started)
        points |= {number: (loss(words), -rate(words)) for number, words in pool.overrides.items()}
    assert [*points] == [*range(25)]
    del points[2]
    assert "job 2 has no value of time/samples_per_second" in caplog.text
    assert [state for state, _, _ in study(source)] == ["COMPLETE"] * 2 + ["PRUNED"] + ["COMPLETE"] * 22
    front = {
        number
        for number, (x, y) in points.items()
        if not any(a <= x and b <= y and (a < x or b < y) for a, b in points.values())
    }
    assert {trial.number for trial in source._study.best_trials} == front
    assert 1 < len(front) < 24
    found = source.best()
    assert [(low, -high) for _, (low, high) in found] == sorted(points[number] for number in front)
    assert all((loss(words), rate(words)) == tuple(both) for words, both in found)
    with pytest.raises(ConfigError, match="another space"), open_search(tmp_path, options, None, *TWO[::-1]):
        pass


def test_several_metrics_are_means_over_seeds_and_one_that_no_job_measures_ends_the_search(tmp_path):
    options = Local(search="random", trials=4, seeds=2)
    with open_search(tmp_path / "a", options, None, *TWO) as source:
        pool = FakeTimedPool(source._ledger.path, 2)
        run(source, pool, options)
    pairs = [[pool.overrides[2 * trial + seed] for seed in (0, 1)] for trial in range(4)]
    wanted = [[statistics.fmean(map(loss, pair)), statistics.fmean(map(rate, pair))] for pair in pairs]
    told = [trial.values for trial in source._study.get_trials(deepcopy=False)]
    assert told[0] == pytest.approx(wanted[0])
    assert told[1] is None, "one of its seeds has no throughput"
    assert told[2:] == [pytest.approx(each) for each in wanted[2:]]
    absent = Objective("eval/f1", "max", best=False)
    with open_search(tmp_path / "b", options, None, LOSS, absent) as source:
        with pytest.raises(ConfigError, match=r"sweep\.metric: got 'eval/f1': the jobs do not measure it"):
            run(source, FakeTimedPool(source._ledger.path, 1), options)
