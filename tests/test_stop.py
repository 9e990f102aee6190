"""Runs that end before their last step: early stopping, a target, and a time budget."""

import json
from functools import partial
from typing import Any

import pytest
from helpers.compose import TINY_CPU, TrainedRun, build_composed_run, compose_config, prepare_session, train_in
from helpers.dry_run import run_in_this_process
from helpers.events import scalar_curves
from helpers.rank_functions import sigterm_at
from helpers.ranks import train_on_rank
from helpers.runs import assert_bitwise_equal, only_run, run_outcome

from runner import training
from runner.config.errors import ConfigError
from runner.parallel.session import Session
from runner.run import Run
from runner.stop import Stop, Stopping
from runner.storage.value_checks import UnexpectedContentError
from runner.tracking.metrics import StepTimer

STEPS = ("steps=40", "eval_every=2", "save_every=0", "log_every=4", "batch_size=32", "data.crop=2")
LOSS = "stop.metric=eval/loss"


def rules(direction: str = "max", **options: Any) -> Stopping:
    """Rules for `eval/accuracy` in one process."""
    return Stop("eval/accuracy", **options).build({"accuracy": direction})


def reasons_after(stopping: Stopping, *values: float) -> list[str]:
    """Return for each evaluation, whose results are `values`, the rule that would end the run after it, or ""."""
    reasons = []
    for number, value in enumerate(values, start=1):
        stopping.evaluated({"eval/accuracy": value, "eval/loss": 0.0}, 10 * number)
        reasons.append(stopping.reason.partition(":")[0])
    return reasons


def replace_losses(losses: list[float], run: Run, session: Session) -> None:
    """Replace the loss of each evaluation on this rank by the next value of `losses`."""
    given, summarize = iter(losses), session.workload.summarize
    session.workload.summarize = lambda sums: summarize(sums) | {"loss": next(given)}


NAN = float("nan")
RULES: list[tuple[str, dict[str, Any], list[float], str]] = [
    ("max", {"patience": 2}, [0.5, 0.4, 0.6, 0.6, 0.5], "stop.patience"),
    ("min", {"patience": 2}, [0.5, 0.6, 0.4, 0.4, 0.5], "stop.patience"),
    ("max", {"patience": 2, "min_delta": 0.25}, [0.5, 0.75, 0.7], "stop.patience"),
    ("max", {"patience": 2, "min_delta": 0.25}, [0.25, 0.375, 0.625, 0.875], ""),  # from the latest improvement
    ("min", {"patience": 1, "min_delta": 0.25}, [1.0, 0.5, 0.25], "stop.patience"),
    ("max", {"target": 0.75}, [0.5, 0.7, 0.75], "stop.target"),
    ("min", {"target": 0.25}, [0.5, 0.3, 0.2], "stop.target"),
    ("max", {"patience": 2, "target": 2}, [NAN, 0.5, NAN, 0.6, NAN, NAN], "stop.patience"),
    ("min", {"patience": 2, "target": 0}, [NAN, NAN, NAN], "stop.patience"),
]


@pytest.mark.parametrize(("direction", "options", "values", "rule"), RULES)
def test_a_run_ends_after_the_first_evaluation_that_meets_its_rule(direction, options, values, rule):
    assert reasons_after(rules(direction, **options), *values) == [*[""] * (len(values) - 1), rule]


def test_a_restored_state_continues_the_count_of_evaluations():
    saved, resumed = rules(patience=3), rules(patience=3)
    reasons_after(saved, 0.5, 0.4, 0.4)
    resumed.load_state_dict(saved.state_dict())
    assert reasons_after(resumed, 0.45) == ["stop.patience"]
    other = Stop("eval/loss", patience=3).build({"loss": "min"})
    other.load_state_dict(saved.state_dict())
    assert other.state_dict() == {}, "the evaluations of another metric do not count"


@pytest.mark.parametrize("change", [{"best": "a"}, {"more": 1}, {"metric": None}])
def test_an_invalid_state_is_refused(change):
    saved = rules(patience=3)
    reasons_after(saved, 0.5)
    with pytest.raises(UnexpectedContentError):
        rules(patience=3).load_state_dict(saved.state_dict() | change)


@pytest.mark.parametrize(
    "overrides",
    [("stop.metric=eval/f1",), ("stop.metric=train/loss",), (LOSS, "eval_every=0"), ("stop.metric=eval/return",)],
)
def test_a_metric_that_is_not_measured_is_refused_before_the_run(overrides):
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*TINY_CPU, *overrides, "stop.patience=2"))
    assert refusal.value.key == "stop.metric"


ACCURACY, DISAGREEMENT = "stop.metric=eval/accuracy", "stop.metric=eval/disagreement"
TARGETS = {
    (ACCURACY, "stop.target=97"): "stop.target=0.97",
    (ACCURACY, "stop.target=1"): None,
    (LOSS, "stop.target=-0.1"): "set a value that it can reach",
    ("parallel=ensemble", "stop.metric=eval/member_1/accuracy", "stop.target=50"): "stop.target=0.5",
    ("parallel=ensemble", DISAGREEMENT, "stop.patience=3"): None,
    ("workload=dqn", "stop.metric=eval/return", "stop.target=400"): None,
}


@pytest.mark.parametrize("overrides", TARGETS, ids=" ".join)
def test_a_target_that_is_never_reached_is_refused(overrides):
    own = [] if overrides[0].startswith("workload=") else TINY_CPU
    run = build_composed_run("device=cpu", *own, *overrides)
    if TARGETS[overrides] is None:
        prepare_session(run)
        return
    with pytest.raises(ConfigError) as refusal:
        prepare_session(run)
    assert (refusal.value.key, refusal.value.remedy) == ("stop.target", TARGETS[overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        (*TINY_CPU, "workload.top5=true"),
        (*TINY_CPU, "parallel=ensemble"),
        ("device=cpu", "workload=regression"),
    ],
    ids=" ".join,
)
def test_a_run_may_end_by_each_metric_that_it_measures(overrides, tmp_path):
    run = build_composed_run(*overrides, "steps=1", "device.threads=1")
    measured = train_in(tmp_path, run).result.evaluation
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*overrides, "stop.metric=eval/recall_0", "stop.patience=2"))
    assert refusal.value.remedy.removeprefix("choose from: ").split(", ") == sorted(measured)


WORSE_FROM_8 = [3.0, 2.0, 1.0, 0.5, *(1.0 + number for number in range(16))]
"""Losses of evaluations every two steps: the fourth, after step 8, is the best."""


@pytest.mark.parametrize("mode", ["ddp", "hogwild", "ensemble", "pipeline"])
def test_all_ranks_stop_after_the_same_step(mode, ranks, tmp_path):
    overrides = (*TINY_CPU, *STEPS, f"parallel={mode}", LOSS, "stop.patience=3")
    change = partial(scripted_where_summarized, mode)
    if mode == "hogwild":  # which starts its own processes
        result = train_in(tmp_path, build_composed_run(*overrides, "stop.patience=null", "stop.target=100")).result
        assert (result.status, result.steps) == ("done", 2)
        return
    result = ranks(2).train(compose_config(*overrides), tmp_path, change)
    assert (result.status, result.steps) == ("done", 14)


def scripted_where_summarized(mode: str, run: Run, session: Session) -> None:
    """Like `replace_losses`, but ranks other than 0 get different losses, as if their rounding errors differed."""
    losses = WORSE_FROM_8 if session.rank == 0 else [loss / 2**number for number, loss in enumerate(WORSE_FROM_8)]
    if mode == "ensemble":  # calls `summarize` twice: for the member and for the vote
        losses = [loss for loss in losses for _ in range(2)]
    replace_losses(losses, run, session)


def test_a_run_without_improvement_is_done_and_a_resume_continues_the_count_of_patience(tmp_path):
    def train(name: str, losses: list[float], sigterm: int = 0) -> TrainedRun:
        def change(run: Run, session: Session) -> None:
            replace_losses(losses, run, session)
            sigterm_at(sigterm, 0, run, session)

        return train_in(tmp_path / name, build_composed_run(*TINY_CPU, *STEPS, LOSS, "stop.patience=3"), change)

    whole = train("whole", WORSE_FROM_8)
    assert (whole.result.status, whole.result.steps) == ("done", 14)
    assert whole.result.stopped_by.startswith("stop.patience: eval/loss has not improved on 0.5 (step 8)")
    assert [path.name for path in (tmp_path / "whole/checkpoints").glob("*14")] == ["step_00000014"]
    assert [step for step, _ in scalar_curves(tmp_path / "whole")["eval/loss"]] == [2, 4, 6, 8, 10, 12, 14]
    stopped = train("stopped", WORSE_FROM_8, sigterm=11)
    assert (stopped.result.status, stopped.result.steps, stopped.result.stopped_by) == ("stopped", 11, "")
    resumed = train("stopped", WORSE_FROM_8[5:])
    assert (resumed.result.status, resumed.result.steps) == ("done", 14)
    assert resumed.result.stopped_by == whole.result.stopped_by
    assert_bitwise_equal(run_outcome(resumed.directory), run_outcome(whole.directory))
    again = train("stopped", WORSE_FROM_8)
    assert (again.result.status, again.result.steps) == ("done", 14), "the rule is met already"


def test_max_time_stops_each_invocation_and_the_resumed_run_is_bitwise_exact(tmp_path, monkeypatch):
    """The clock advances by one second per step, and starts at zero in each invocation."""
    monkeypatch.setattr(StepTimer, "elapsed", lambda timer: float(timer._rounds))
    overrides = (*TINY_CPU, *STEPS, "steps=12")
    wanted = train_in(tmp_path / "whole", build_composed_run(*overrides)).directory
    results = [train_in(tmp_path / "parts", build_composed_run(*overrides, "stop.max_time=5")).result for _ in range(3)]
    assert [(result.status, result.steps) for result in results] == [("stopped", 5), ("stopped", 10), ("done", 12)]
    assert [result.stopped_by for result in results] == ["stop.max_time: 5 s have passed"] * 2 + [""]
    assert_bitwise_equal(run_outcome(tmp_path / "parts"), run_outcome(wanted))


def test_max_time_that_passes_while_a_stopped_run_is_saved_is_not_the_reason(tmp_path, monkeypatch):
    clock, save = [0.0], training.save
    monkeypatch.setattr(StepTimer, "elapsed", lambda timer: clock[0])
    monkeypatch.setattr(training, "save", lambda state: (save(state), clock.__setitem__(0, 9.0)))
    run = build_composed_run(*TINY_CPU, *STEPS, "stop.max_time=5")
    result = train_in(tmp_path, run, partial(sigterm_at, 1, 0)).result
    assert (result.status, result.steps, result.stopped_by) == ("stopped", 1, "")


@pytest.mark.parametrize(("ranks_without_time", "ended"), [((0, 1), "stopped"), ((1,), "done")])
def test_rank_0_decides_whether_max_time_has_passed_and_all_ranks_name_the_rule(
    ranks_without_time, ended, ranks, tmp_path
):
    config = compose_config(*TINY_CPU, *STEPS, "steps=4", "parallel=ddp")
    results = ranks(2).call_on_all(train_on_rank, config, tmp_path, partial(without_time_on, ranks_without_time))
    assert [result.status for result in results] == [ended] * 2
    rule = "stop.max_time: 1e-09 s have passed" if ended == "stopped" else ""
    assert [result.stopped_by for result in results] == [rule] * 2


def without_time_on(without_time: tuple[int, ...], run: Run, session: Session) -> None:
    run.stop.max_time = 1e-9 if session.rank in without_time else None


def test_the_exit_code_is_0_after_a_target_and_75_after_max_time(tmp_path):
    early = (*TINY_CPU, *STEPS, LOSS, "stop.target=100", "stop.max_time=100000")
    code, console = run_in_this_process([*early], tmp_path)
    assert code == 0, console
    directory = only_run(tmp_path)
    result = json.loads((directory / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 2)
    assert result["stopped_by"].startswith("stop.target: eval/loss is ")
    assert result["stopped_by"] in console

    code, console = run_in_this_process([f"resume={directory}"], tmp_path)
    assert (code, "all 2 steps are done: stop.target" in console) == (0, True), console
    more = ("stop.metric=null", "stop.target=null", "stop.max_time=1e-9")
    code, console = run_in_this_process([f"resume={directory}", *more], tmp_path)
    assert (code, "resumed after step 2" in console) == (75, True), console
    assert json.loads((directory / "result.json").read_text())["steps"] == 3
