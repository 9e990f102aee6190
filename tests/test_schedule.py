"""Tests that the learning rate of every update equals that of torch's own schedulers."""

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.compose import compose_config, option_content
from helpers.events import scalar_curves
from helpers.plain_loop import largest_difference, weights_at
from helpers.strange_networks import CPU, numbers, tanh, trained_with
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

import runner
from runner.config import user_code
from runner.config.errors import ConfigError
from runner.config.schema import build
from runner.optimizer import SGD, Optimizer
from runner.plateau import Plateau
from runner.schedule import Cosine, Linear, OneCycle, Schedule, Step, with_function
from runner.seeds import derive
from runner.torch_optimizer import learning_rates

PEAK = 0.3


def optimizer(lr: float = PEAK) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)


def torch_rates(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], num_updates: int) -> list[float]:
    """Return the learning rate of each update with torch's scheduler."""
    chosen = optimizer()
    scheduler, rates = make(chosen), []
    for _ in range(num_updates):
        rates.append(chosen.param_groups[0]["lr"])
        chosen.step()
        with warnings.catch_warnings():  # SequentialLR passes a deprecated argument to its schedulers
            warnings.filterwarnings("ignore", "The epoch parameter", UserWarning)
            scheduler.step()
    return rates


def our_rates(schedule: Schedule, num_updates: int) -> list[float]:
    chosen, rates, of_run = optimizer(), [], schedule.build({}, ("loss", "min"))
    for update in range(num_updates):
        of_run.set_lr(chosen, update, num_updates)
        rates.append(chosen.param_groups[0]["lr"])
    return rates


def close(rates: list[float]):
    return pytest.approx(rates, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("num_updates", [10, 99, 100, 1000])
@pytest.mark.parametrize("milestones", [(0.5, 0.75), (0.29, 0.55, 0.57), (1 / 3, 0.9)])
def test_step_is_multi_step_lr(num_updates, milestones):
    updates = [math.ceil(round(share * num_updates, 6)) for share in milestones]
    expected = torch_rates(lambda o: lr_scheduler.MultiStepLR(o, updates, gamma=0.2), num_updates)
    assert our_rates(Step(milestones=milestones, gamma=0.2), num_updates) == close(expected)


@pytest.mark.parametrize("num_updates", [1, 2, 7, 100])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_cosine_is_cosine_annealing_lr(num_updates, final):
    expected = torch_rates(
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=num_updates, eta_min=final * PEAK), num_updates
    )
    assert our_rates(Cosine(final=final), num_updates) == close(expected)


@pytest.mark.parametrize("num_updates", [1, 7, 100])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_linear_is_linear_lr(num_updates, final):
    def make(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=final, total_iters=num_updates)

    assert our_rates(Linear(final=final), num_updates) == close(torch_rates(make, num_updates))


PLATEAUS = (
    Plateau(patience=0),
    Plateau(patience=2, gamma=0.5, final=0.1),
    Plateau(patience=1, gamma=0.3, threshold=0.2, cooldown=3),
    Plateau(patience=1, gamma=0.5, threshold=0.05, threshold_mode="abs", cooldown=1),
)


@pytest.mark.parametrize("direction", ["min", "max"])
@pytest.mark.parametrize("schedule", PLATEAUS)
def test_plateau_is_reduce_lr_on_plateau_also_after_a_resume(schedule, direction):
    """The metric improves by less and less, is sometimes worse, infinite, or not defined."""
    noise = torch.rand(60, generator=torch.Generator().manual_seed(1)).tolist()
    values = [1 + (2 / (k + 1) + noise[k] / 5) * (1 if direction == "min" else -1) for k in range(60)]
    values[20] = values[41] = math.nan
    values[50] = math.inf  # the best of all, or the worst
    chosen, mine, goal = optimizer(), optimizer(), {"a": "min" if direction == "max" else "max", "b": direction}
    scheduler = lr_scheduler.ReduceLROnPlateau(
        chosen, direction, schedule.gamma, schedule.patience, schedule.threshold, schedule.threshold_mode,
        schedule.cooldown, min_lr=schedule.final * PEAK,
    )  # fmt: skip
    rates = schedule.build(goal, ("b", direction))
    for step, value in enumerate(values, start=1):
        scheduler.step(value)
        rates.evaluated({"eval/a": 0.0, "eval/b": value}, step)
        again = schedule.build(goal, ("b", direction))
        again.load_state_dict(rates.state_dict())
        rates = again
        rates.set_lr(mine, step, 100)
        assert mine.param_groups[0]["lr"] == pytest.approx(chosen.param_groups[0]["lr"], rel=1e-9, abs=2e-8)
    assert mine.param_groups[0]["lr"] < PEAK


def test_the_rate_is_reduced_for_a_constant_negative_metric_and_not_for_one_that_rises():
    """As -1 is no improvement on -1; `ReduceLROnPlateau` takes it for one, as it multiplies by 1 - threshold."""
    for values, wanted in (([-1.0] * 5, PEAK * 0.1), ([-5.0, -4.0, -3.0, -2.0, -1.0], PEAK)):
        rates, chosen = Plateau(metric="eval/r", patience=3).build({"r": "max"}, ("loss", "min")), optimizer()
        for step, value in enumerate(values):
            rates.evaluated({"eval/r": value}, step)
        rates.set_lr(chosen, 0, 10)
        assert chosen.param_groups[0]["lr"] == pytest.approx(wanted)


def test_the_warm_up_of_plateau_is_that_of_other_schedules():
    assert our_rates(Plateau(warmup=0.1), 100) == our_rates(Schedule(warmup=0.1), 100)
    assert [schedule.is_stretched for schedule in (Schedule(), Plateau(), Plateau(warmup=0.1), Linear())] == [
        *(False, False),
        *(True, True),
    ]


def test_a_plateau_needs_evaluations_of_its_metric(caplog):
    with pytest.raises(ConfigError, match=r"^schedule\.metric: got 'eval/los': .*\n.*eval/loss"):
        Plateau(metric="eval/los").check_evaluations({"loss": "min"}, "eval/loss", 5)
    Plateau().check_evaluations({"loss": "min"}, "eval/loss", 0)
    assert "the only evaluation is at the end" in caplog.text


@pytest.mark.parametrize("num_updates", [7, 50, 101, 1000])
@pytest.mark.parametrize(("rise", "start_div", "final_div"), [(0.3, 25.0, 1e4), (0.5, 10.0, 100.0), (0.9, 2.0, 1.0)])
def test_one_cycle_is_one_cycle_lr(num_updates, rise, start_div, final_div):
    def make(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(
            o, PEAK, total_steps=num_updates, pct_start=rise, div_factor=start_div,
            final_div_factor=final_div, cycle_momentum=False,
        )  # fmt: skip

    ours = our_rates(OneCycle(rise=rise, start_div=start_div, final_div=final_div), num_updates)
    assert ours == close(torch_rates(make, num_updates))


@pytest.mark.parametrize(("share", "warmup"), [(0.1, 10), (0.05, 5), (0.01, 1)])
def test_warm_up_is_linear_lr_before_the_schedule(share, warmup):
    def make(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        rising = lr_scheduler.LinearLR(o, start_factor=1 / warmup, total_iters=warmup - 1)
        falling = lr_scheduler.CosineAnnealingLR(o, T_max=100 - warmup)
        return lr_scheduler.SequentialLR(o, [rising, falling], milestones=[warmup])

    assert our_rates(Cosine(warmup=share), 100) == close(torch_rates(make, 100))


@pytest.mark.parametrize("schedule", [Cosine(warmup=30), Linear(warmup=30), Step(warmup=30, milestones=(0.5,))])
def test_a_warm_up_in_steps_is_as_long_in_every_run(schedule):
    num_updates = 80

    def after(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        if isinstance(schedule, Cosine):
            return lr_scheduler.CosineAnnealingLR(o, T_max=num_updates - 30)
        if isinstance(schedule, Linear):
            return lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=num_updates - 30)
        return lr_scheduler.MultiStepLR(o, [(num_updates - 30) // 2])

    def make(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        rising = lr_scheduler.LinearLR(o, start_factor=1 / 30, total_iters=29)
        return lr_scheduler.SequentialLR(o, [rising, after(o)], milestones=[30])

    assert our_rates(schedule, num_updates) == close(torch_rates(make, num_updates))
    assert our_rates(schedule, 400)[:30] == close([PEAK * (step + 1) / 30 for step in range(30)])
    assert schedule.is_stretched
    assert not Schedule(warmup=30).is_stretched


def test_a_warm_up_that_the_run_does_not_reach_the_end_of_is_said(caplog):
    assert our_rates(Cosine(warmup=30), 10) == close([PEAK * (step + 1) / 30 for step in range(10)])
    for length in (31, 30, 10):
        Cosine(warmup=30).check_length(length)
    assert [record.getMessage() for record in caplog.records] == [
        "schedule.warmup=30: the run ends after 30 steps, before the warm-up, with 1 × optimizer.lr",
        "schedule.warmup=30: the run ends after 10 steps, before the warm-up, with 0.333 × optimizer.lr",
    ]


@pytest.mark.parametrize("value", [1, 1.0, "1", 1.5, -1, True])
def test_a_warm_up_that_is_neither_a_fraction_nor_steps_is_refused(value):
    with pytest.raises(ConfigError) as refused:
        build(option_content("schedule", "cosine") | {"warmup": value}, Schedule, "schedule")
    assert (refused.value.key, refused.value.got in (value, 1)) == ("schedule.warmup", True)


def given(function: Any) -> Any:
    return user_code.using(user_code.passed(schedule=function))


def test_a_function_is_lambda_lr_also_after_a_warm_up(caplog):
    caplog.set_level("INFO")

    def schedule(step: int, num_steps: int) -> float:
        return 1 / (1 + 9 * step / num_steps)

    with given(schedule):
        expected = torch_rates(lambda o: lr_scheduler.LambdaLR(o, lambda step: schedule(step, 50)), 50)
        assert our_rates(Schedule(), 50) == close(expected)
        rising = [PEAK * (step + 1) / 10 for step in range(10)]
        assert our_rates(Schedule(warmup=10), 60) == close([*rising, *expected])
        with_function(Schedule()).check_length(50)
    assert "0.102 to 1 × optimizer.lr" in caplog.text


def in_turn() -> Callable[[int, int], float]:
    calls = itertools.count()
    return lambda step, num_steps: next(calls) / 1000


def raising(step: int, num_steps: int) -> float:
    raise ValueError("no rate")


@pytest.mark.cases(
    (lambda step, num_steps: -0.1, "returned it for step 0 of 20"),
    (lambda step, num_steps: math.inf * (step == 19), "returned it for step 0 of 20"),  # 0 · inf is NaN
    (lambda step, num_steps: 1 if step < 19 else math.inf, "returned it for step 19 of 20"),
    (lambda step, num_steps: "0.5", "returned it"),
    (lambda step, num_steps: step < 10, "tests/test_schedule.py:"),
    (lambda step, num_steps: torch.tensor(True), "returned it"),
    (lambda step, num_steps: numpy.bool_(True), "returned it"),
    (lambda step, num_steps: 1.0 if step < 19 else 1e300, "returned it for step 19 of 20"),
    (lambda step, num_steps: None, "returned it"),
    (lambda step, num_steps: {"momentun": 0.5}, "returned it"),
    (lambda step, num_steps: {"lr": 0.5, "momentum": 1.5}, "returned it"),
    (lambda step, num_steps: {"lr": 1.0, "momentum": 0.5} if step < 19 else {"lr": 1.0}, "for step 19 the function"),
    (lambda step, num_steps: torch.ones(2), "it raises"),
    (raising, "ValueError: no rate"),
    (in_turn(), "returned 0.0, and then 0.039"),
    (lambda step: 1.0, "no function of (step, num_steps)"),
    (0.5, "no function of (step, num_steps)"),
    (lr_scheduler.LambdaLR, "it raises"),
)
def test_a_function_that_is_no_schedule_is_refused_before_the_first_step(function, why):
    with given(function), pytest.raises(ConfigError) as refused:
        with_function(Schedule()).check_length(20)
    assert refused.value.key == "schedule"
    assert why in refused.value.why


def test_a_function_is_tried_for_the_last_step_of_a_long_run():
    with given(lambda step, num_steps: 1 / (num_steps - 1 - step)), pytest.raises(ConfigError, match="ZeroDivision"):
        with_function(Schedule()).check_length(123_457)


def test_a_function_beside_another_schedule_is_refused():
    with given(lambda step, num_steps: 1.0), pytest.raises(ConfigError, match="schedule: got 'cosine': code gives a"):
        with_function(Cosine())


def test_groups_may_have_schedules_of_their_own():
    """The warm-up of a new head, and a constant rate elsewhere: as with one function a group of `LambdaLR`."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = {
        "2": {"lr": 0.2, "schedule": {"name": "cosine", "warmup": 5, "final": 0.1}},
        "0": {"schedule": "constant"},
    }
    options = SGD(lr=0.1, groups=groups)
    chosen = options.build(model)
    theirs = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.1, 0.1, 0.2)])

    def of_head(step: int) -> float:
        return (step + 1) / 5 if step < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 5) / 15)) / 2

    scheduler = lr_scheduler.LambdaLR(theirs, [lambda step: 1 - step / 20, lambda step: 1.0, of_head])
    rates = Linear().build({}, ("loss", "min"), options.schedules())
    for update in range(20):
        rates.set_lr(chosen, update, 20)
        found = learning_rates(chosen)
        wanted = [group["lr"] for group in theirs.param_groups]
        assert [found["lr"], found["lr/0"], found["lr/2"]] == close(wanted)
        theirs.step()
        scheduler.step()


@pytest.mark.cases(
    ("cosin", "", "did you mean cosine"),
    ({"warmup": 5}, "", "for example constant"),
    (None, "", "for example constant"),
    ({"name": "cosine", "warmup": 1}, ".warmup", "schedule.warmup=500"),
    ({"name": "cosine", "finale": 0}, ".finale", "did you mean final"),
    ("plateau", "", "schedule=plateau"),
    (3, "", "choose from"),
)
def test_the_schedule_of_a_group_is_checked_as_that_of_a_run(value, key, remedy):
    node = option_content("optimizer", "sgd") | {"groups": {"head": {"schedule": value}}}
    with pytest.raises(ConfigError) as refused:
        build(node, Optimizer, "optimizer")
    assert refused.value.key == f"optimizer.groups.head.schedule{key}"
    assert remedy in refused.value.remedy


def test_every_group_keeps_its_own_rate():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.4)]
    chosen = torch.optim.SGD(groups)
    for update in (0, 50, 99, 50):  # in any order: the factor is a pure function of the update
        Cosine().build({}, ("loss", "min")).set_lr(chosen, update, 100)
        factor = (1 + math.cos(math.pi * update / 100)) / 2
        assert [group["lr"] for group in chosen.param_groups] == pytest.approx([0.1 * factor, 0.4 * factor])


def falling(step: int, num_steps: int) -> dict[str, float]:
    return {"lr": 0.9**step, "weight_decay": 1 + step, "beta1": 1 / (1 + step)}


BY_OPTION = ["schedule=linear", "schedule.options={weight_decay:{name:cosine,final:0.1},beta1:{name:linear,final:0.5}}"]


def plain_weights(factors: Callable[[int], dict[str, float]], num_steps: int) -> dict[str, torch.Tensor]:
    """Train `tanh` in plain PyTorch, in float64, with AdamW whose options are multiplied by `factors` of the step."""
    torch.manual_seed(derive(0, "weights"))
    model = tanh().double()
    update = torch.optim.AdamW(model.parameters())
    inputs, targets = numbers()
    stream = [torch.randperm(48, generator=torch.Generator().manual_seed(derive(0, "order", e))) for e in range(2)]
    for step, rows in enumerate(torch.cat(stream).split(12)[:num_steps]):
        found = factors(step)
        options = {"lr": 0.01 * found["lr"], "weight_decay": 0.1 * found["weight_decay"]}
        update.param_groups[0].update(options, betas=(0.9 * found["beta1"], 0.999))
        update.zero_grad()
        cross_entropy(model(inputs[rows].double()), targets[rows]).backward()
        update.step()
    return model.state_dict()


def train(ranks: Any, directory: Path, words: list[str], count: int = 1, **given: Any) -> None:
    parts = {"model": tanh, "data": (numbers(), numbers()), **given}
    options = ["optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "precision=64", "log_every=1"]
    base = [word for word in CPU if not word.startswith(("schedule", "steps"))]
    config = compose_config(*user_code.passed(**parts).added_to([*base, *options, *words]))
    result = ranks(count).call_on_all(trained_with, parts, config, directory)[0]
    assert not isinstance(result, str), result


@pytest.mark.parametrize("mode", ["parallel=single", "parallel=ddp", "accumulation=2"])
def test_weight_decay_and_betas_follow_schedules_as_in_a_plain_loop(mode, ranks, tmp_path):
    train(ranks, tmp_path, [*BY_OPTION, "steps=6", mode], 1 + ("ddp" in mode))

    def factors(step: int) -> dict[str, float]:
        decay = 0.1 + 0.9 * (1 + math.cos(math.pi * step / 6)) / 2
        return {"lr": 1 - step / 6, "weight_decay": decay, "beta1": 1 - 0.5 * step / 6}

    assert largest_difference(weights_at(tmp_path, 6), plain_weights(factors, 6)) < 1e-12
    curves = scalar_curves(tmp_path)
    for name, value in (("lr", 0.01), ("weight_decay", 0.1), ("beta1", 0.9)):
        wanted = [value * factors(step)[name] for step in range(6)]
        assert [point for _, point in curves[name]] == pytest.approx(wanted, rel=1e-6)


def test_a_function_gives_factors_of_several_options_also_after_a_resume(ranks, tmp_path):
    for words, count in ((["steps=3", "parallel=ddp"], 2), (["steps=6"], 1)):
        train(ranks, tmp_path, words, count, schedule=falling)
    assert largest_difference(weights_at(tmp_path, 6), plain_weights(lambda step: falling(step, 6), 6)) < 1e-12


def test_momentum_of_a_group_follows_the_schedule_of_the_group():
    groups = {"1": {"schedule": {"name": "linear", "options": {"momentum": {"name": "linear", "final": 0.5}}}}}
    options = SGD(lr=0.1, momentum=0.8, groups=groups)
    chosen = options.build(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    rates = Schedule().build({}, ("loss", "min"), options.schedules())
    assert rates.others(chosen, 10) == ["momentum"]
    for update in (0, 5, 9, 5):
        rates.set_lr(chosen, update, 10)
        assert [group["momentum"] for group in chosen.param_groups] == close([0.8, 0.8 * (1 - 0.05 * update)])
        assert [group["lr"] for group in chosen.param_groups] == close([0.1, 0.1 * (1 - 0.1 * update)])


def test_a_function_of_several_options_begins_after_the_warm_up():
    with given(falling):
        schedule = with_function(Schedule(warmup=4))
    assert schedule.factors(1, 10) == {"lr": 0.5, "weight_decay": 1, "beta1": 1}
    assert schedule.factors(6, 10) == falling(2, 6)


@pytest.mark.cases(
    ({"momentun": "cosine"}, "momentun", "did you mean momentum"),
    ({"momentum": "cosin"}, "momentum", "did you mean cosine"),
    ({"momentum": {"name": "linear", "final": 2}}, "momentum.final", ""),
    ({"momentum": {"name": "linear", "options": {"momentum": "linear"}}}, "momentum", "beside"),
    ({"momentum": "plateau"}, "momentum", "another one here"),
)
def test_schedules_of_options_are_checked(options, key, remedy):
    with pytest.raises(ConfigError) as refused:
        build(option_content("schedule", "cosine") | {"options": options}, Schedule, "schedule")
    assert refused.value.key == f"schedule.options.{key}"
    assert remedy in refused.value.remedy


@pytest.mark.cases(
    (SGD(lr=0.1), "beta1"), (SGD(lr=0.1), "weight_decay"), (SGD(lr=0.1, momentum=0.0), "momentum"), ids=str,
)  # fmt: skip
def test_a_schedule_of_what_the_optimizer_does_not_have_is_refused(options, name):
    rates = Schedule(options={name: "cosine"}).build({}, ("loss", "min"))
    with pytest.raises(ConfigError, match="it is 0") as refused:
        rates.others(options.build(torch.nn.Linear(2, 2)), 10)
    assert (refused.value.key, refused.value.got) == ("schedule.options", name)


def test_a_compiled_step_refuses_schedules_of_other_options(tmp_path):
    words = ["model=tiny", "data.size=8", "device=cpu", "steps=1", "compile=step", f"output_root={tmp_path}"]
    with pytest.raises(ConfigError, match="compiled once"):
        runner.train([*words, "schedule.options={momentum:linear}"])
