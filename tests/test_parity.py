"""`train` against a plain PyTorch loop, written here: the same weights and the same curve."""

from __future__ import annotations

import pytest
import torch
from helpers.events import curves
from helpers.plain_loop import CASES, COMMON, STEPS, largest_difference, plain_evaluation, plain_loop, weights_at

from runner.run import Run


def weights(run: Run) -> dict[str, torch.Tensor]:
    return weights_at(run.directory, STEPS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 7])
def test_weights_and_curve_are_those_of_a_plain_loop(case, seed, trained):
    overrides, optimizer = CASES[case]
    run = trained(*COMMON, *overrides, f"seed={seed}")
    wanted, losses, accuracies = plain_loop(run, optimizer)
    assert largest_difference(weights(run), wanted) <= 1e-6

    logged = curves(run.directory)
    assert [value for _, value in logged["train/loss"]] == pytest.approx(losses, rel=1e-5)
    assert [value for _, value in logged["train/accuracy"]] == pytest.approx(accuracies)
    assert [step for step, _ in logged["train/loss"]] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("accumulation", [2, 4, 8])
@pytest.mark.parametrize("channels_last", ["true", "false"])
def test_accumulation_is_exact(accumulation, channels_last, trained):
    whole = trained(*COMMON, directory="whole")
    parts = trained(
        *COMMON, f"accumulation={accumulation}", f"channels_last={channels_last}", directory=f"parts{accumulation}"
    )
    assert largest_difference(weights(parts), weights(whole)) <= 1e-6


def test_a_batch_across_the_border_of_two_epochs_is_not_cut(trained):
    run = trained(*[text for text in COMMON if not text.startswith("batch_size")], "batch_size=200")
    wanted = plain_loop(run, CASES["sgd"][1]).weights
    assert largest_difference(weights(run), wanted) <= 1e-6


def test_gradients_are_clipped_by_the_norm_of_the_whole_batch(trained):
    run = trained(*COMMON, "accumulation=4", "max_grad_norm=0.1")
    wanted = plain_loop(run, CASES["sgd"][1], max_norm=0.1).weights
    unclipped = plain_loop(run, CASES["sgd"][1]).weights
    assert largest_difference(weights(run), wanted) <= 1e-6
    assert largest_difference(unclipped, wanted) > 1e-3


def test_the_schedule_gives_each_step_its_rate(trained):
    run = trained(*COMMON, "schedule=step", "schedule.milestones=[0.4]", "schedule.warmup=0.2")
    rates = [0.025, 0.05] + [0.05] * 4 + [0.005] * 4  # two of warm-up, then 0.4 of the eight that are left
    wanted = plain_loop(run, CASES["sgd"][1], learning_rates=rates).weights
    assert largest_difference(weights(run), wanted) <= 1e-6
    assert [rate for _, rate in curves(run.directory)["lr"]] == pytest.approx(rates)


def test_double_precision_is_double_throughout(trained):
    run = trained(*COMMON, "precision=64")
    wanted = plain_loop(run, CASES["sgd"][1], dtype=torch.float64).weights
    assert all(tensor.dtype == torch.float64 for tensor in weights(run).values())
    assert largest_difference(weights(run), wanted) <= 1e-13


@pytest.mark.parametrize("precision", ["bf16", "16"])
def test_sixteen_bits_round_but_keep_the_weights_whole(precision, trained):
    run = trained(*COMMON, f"precision={precision}")
    wanted = plain_loop(run, CASES["sgd"][1]).weights
    assert all(tensor.dtype == torch.float32 for tensor in weights(run).values())
    assert 1e-6 < largest_difference(weights(run), wanted) < 0.05, "rounded to 16 bits, and not more"


def test_one_seed_gives_one_run_and_another_seed_another(trained):
    runs = [trained(*COMMON, "data.crop=2", f"seed={seed}", directory=f"run{i}") for i, seed in enumerate((3, 3, 4))]
    first, again, other = map(weights, runs)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert largest_difference(first, other) > 0.1


def test_evaluation_is_that_of_the_trained_weights_on_every_held_out_sample(trained):
    run = trained(*COMMON, "workload.eval_batch_size=50")  # 359 samples: the last batch is short
    loss, accuracy = plain_evaluation(run, weights(run))
    assert run.result.metrics["eval/accuracy"] == accuracy
    assert run.result.metrics["eval/loss"] == pytest.approx(loss, rel=1e-5)
