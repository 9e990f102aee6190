"""Tests that a run equals a plain PyTorch loop: the same weights and the same curves."""

import pytest
import torch
from helpers import plain_loop as loops
from helpers.compose import TrainedRun
from helpers.events import scalar_curves


def weights(trained: TrainedRun) -> dict[str, torch.Tensor]:
    return loops.weights_at(trained.directory, loops.STEPS)


@pytest.mark.parametrize(("case", "seed"), [(case, 7 * (i % 2)) for i, case in enumerate(loops.OPTIMIZER_CASES)])
def test_weights_and_curves_equal_those_of_a_plain_loop(case, seed, trained):
    overrides, optimizer = loops.OPTIMIZER_CASES[case]
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, *overrides, f"seed={seed}")
    wanted, losses, accuracies = loops.plain_loop(run.run, optimizer)
    assert loops.largest_difference(weights(run), wanted) <= 1e-6

    logged = scalar_curves(run.directory)
    assert [value for _, value in logged["train/loss"]] == pytest.approx(losses, rel=1e-5)
    assert [value for _, value in logged["train/accuracy"]] == pytest.approx(accuracies)
    assert [step for step, _ in logged["train/loss"]] == list(range(1, loops.STEPS + 1))


@pytest.mark.parametrize(("accumulation", "channels_last"), [(2, "false"), (4, "true"), (8, "false")])
def test_accumulation_changes_nothing(accumulation, channels_last, trained):
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, f"accumulation={accumulation}", f"channels_last={channels_last}")
    wanted = loops.plain_loop(run.run, loops.OPTIMIZER_CASES["sgd"][1]).weights
    assert loops.largest_difference(weights(run), wanted) <= 1e-6


def test_a_batch_may_span_two_epochs(trained):
    run = trained(*[text for text in loops.PLAIN_LOOP_OVERRIDES if not text.startswith("batch_size")], "batch_size=200")
    wanted = loops.plain_loop(run.run, loops.OPTIMIZER_CASES["sgd"][1]).weights
    assert loops.largest_difference(weights(run), wanted) <= 1e-6


def test_gradients_are_clipped_by_the_norm_of_the_whole_batch(trained):
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, "accumulation=4", "max_grad_norm=0.1")
    wanted = loops.plain_loop(run.run, loops.OPTIMIZER_CASES["sgd"][1], loops.PlainSettings(max_norm=0.1)).weights
    unclipped = loops.plain_loop(run.run, loops.OPTIMIZER_CASES["sgd"][1]).weights
    assert loops.largest_difference(weights(run), wanted) <= 1e-6
    assert loops.largest_difference(unclipped, wanted) > 1e-3


def test_each_step_has_the_learning_rate_of_the_schedule(trained):
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, "schedule=step", "schedule.milestones=[0.4]", "schedule.warmup=0.2")
    rates = [0.025, 0.05] + [0.05] * 4 + [0.005] * 4  # two steps of warm-up, then 0.4 of the other eight, rounded up
    wanted = loops.plain_loop(
        run.run, loops.OPTIMIZER_CASES["sgd"][1], loops.PlainSettings(learning_rates=tuple(rates))
    ).weights
    assert loops.largest_difference(weights(run), wanted) <= 1e-6
    assert [rate for _, rate in scalar_curves(run.directory)["lr"]] == pytest.approx(rates)


def test_double_precision_is_used_throughout(trained):
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, "precision=64")
    wanted = loops.plain_loop(
        run.run, loops.OPTIMIZER_CASES["sgd"][1], loops.PlainSettings(dtype=torch.float64)
    ).weights
    assert all(tensor.dtype == torch.float64 for tensor in weights(run).values())
    assert loops.largest_difference(weights(run), wanted) <= 1e-13


@pytest.mark.parametrize("precision", ["bf16", "16"])
def test_16_bit_precision_rounds_but_keeps_float32_weights(precision, trained):
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, f"precision={precision}")
    wanted = loops.plain_loop(run.run, loops.OPTIMIZER_CASES["sgd"][1]).weights
    assert all(tensor.dtype == torch.float32 for tensor in weights(run).values())
    assert 1e-6 < loops.largest_difference(weights(run), wanted) < 0.05, "rounded to 16 bits, and not more"


def test_equal_seeds_give_equal_runs_and_other_seeds_different_ones(trained):
    runs = [
        trained(*loops.PLAIN_LOOP_OVERRIDES, "data.crop=2", f"seed={seed}", directory=f"run{i}")
        for i, seed in enumerate((3, 3, 4))
    ]
    first, again, other = map(weights, runs)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert loops.largest_difference(first, other) > 0.1


def test_evaluation_covers_every_held_out_sample_once(trained):
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, "workload.eval_batch_size=50")  # 359 samples: the last batch is short
    loss, accuracy = loops.plain_evaluation(run.run, weights(run))
    assert run.result.metrics["eval/accuracy"] == accuracy
    assert run.result.metrics["eval/loss"] == pytest.approx(loss, rel=1e-5)
