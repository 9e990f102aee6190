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
    """In float64, where only the order of sums differs, which Adam and its like divide by small gradients."""
    overrides, optimizer = loops.OPTIMIZER_CASES[case]
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, *overrides, f"seed={seed}", "precision=64")
    wanted, losses, accuracies = loops.plain_loop(run.run, optimizer, loops.PlainSettings(dtype=torch.float64))
    assert loops.largest_difference(weights(run), wanted) <= 1e-11

    logged = scalar_curves(run.directory)
    assert [value for _, value in logged["train/loss"]] == pytest.approx(losses, rel=1e-5)
    assert [value for _, value in logged["train/accuracy"]] == pytest.approx(accuracies)
    assert [step for step, _ in logged["train/loss"]] == list(range(1, loops.STEPS + 1))


SCHEDULE = ("schedule=step", "schedule.milestones=[0.4]", "schedule.warmup=0.2")
RATES = (0.025, 0.05, *[0.05] * 4, *[0.005] * 4)  # two steps of warm-up, then 0.4 of the other eight, rounded up


@pytest.mark.cases(
    *((("accumulation=2", "channels_last=false"), {}), (("accumulation=4",), {}), (("accumulation=8",), {})),
    (("batch_size=200",), {}),  # which may span two epochs
    (("accumulation=4", "max_grad_norm=0.1"), {"max_norm": 0.1}),  # by the norm of the whole batch
    *((SCHEDULE, {"learning_rates": RATES}), (("precision=64",), {"dtype": torch.float64})),
    ids=str,
)
def test_weights_of_a_divided_clipped_scheduled_or_double_run_equal_those_of_a_plain_loop(overrides, settings, trained):
    run = trained(*loops.PLAIN_LOOP_OVERRIDES, *overrides)
    wanted = loops.plain_loop(run.run, loops.OPTIMIZER_CASES["sgd"][1], loops.PlainSettings(**settings)).weights
    dtype = settings.get("dtype", torch.float32)
    assert all(tensor.dtype == dtype for tensor in weights(run).values())
    assert loops.largest_difference(weights(run), wanted) <= (1e-13 if dtype == torch.float64 else 1e-6)
    if "max_norm" in settings:
        unclipped = loops.plain_loop(run.run, loops.OPTIMIZER_CASES["sgd"][1]).weights
        assert loops.largest_difference(unclipped, wanted) > 1e-3
    if "learning_rates" in settings:
        assert [rate for _, rate in scalar_curves(run.directory)["lr"]] == pytest.approx(RATES)


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
