"""`train` against a plain PyTorch loop, written here: the same weights and the same curve."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from conftest import built
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runner.run import Run
from runner.seeds import derive

STEPS = 10
BATCH = 48


def plain_loop(
    run: Run,
    optimizer: Callable[..., torch.optim.Optimizer],
    learning_rates: list[float] | None = None,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Weights, losses and accuracies after `STEPS` steps of the loop that everybody knows."""
    samples, _ = run.workload.data.load()  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(derive(run.seed, "weights"))
    model = run.workload.model.build(samples.shape, 10).to(dtype)  # pyright: ignore[reportAttributeAccessIssue]
    update = optimizer(model.parameters())
    losses, accuracies = [], []
    # One permutation an epoch, laid end to end: a batch may begin in one and end in the next.
    epochs = [derive(run.seed, "order", epoch) for epoch in range(2)]
    stream = torch.cat([torch.randperm(len(samples), generator=torch.Generator().manual_seed(e)) for e in epochs])
    for step in range(STEPS):
        indices = stream[step * run.batch_size : (step + 1) * run.batch_size]
        outputs = model(samples.inputs[indices].to(dtype))
        loss = torch.nn.functional.cross_entropy(outputs, samples.targets[indices])
        update.zero_grad()
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if learning_rates:
            update.param_groups[0]["lr"] = learning_rates[step]
        update.step()
        losses.append(loss.item())
        accuracies.append((outputs.argmax(1) == samples.targets[indices]).float().mean().item())
    return model.state_dict(), losses, accuracies


def weights(run: Run) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run.directory / "checkpoints" / f"step_{STEPS:08d}" / "model.safetensors")


def largest_difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor, by norm."""
    assert got.keys() == wanted.keys()
    return max(((got[n] - wanted[n]).norm() / wanted[n].norm().clamp_min(1e-12)).item() for n in wanted)


COMMON = ("data.crop=0", "schedule=constant", f"steps={STEPS}", f"batch_size={BATCH}", "log_every=1", "eval_every=0")
CASES = {
    "sgd": (["optimizer.lr=0.05"], lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        ["optimizer.lr=0.05", "optimizer.nesterov=true", "optimizer.weight_decay=0.01"],
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (["optimizer=adam", "optimizer.lr=0.003"], lambda p: torch.optim.Adam(p, lr=0.003)),
    "adamw": (["optimizer=adamw", "optimizer.lr=0.003"], lambda p: torch.optim.AdamW(p, lr=0.003, weight_decay=0.01)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 7])
def test_weights_and_curve_are_those_of_a_plain_loop(case, seed, trained):
    overrides, optimizer = CASES[case]
    run = trained(*COMMON, *overrides, f"seed={seed}")
    wanted, losses, accuracies = plain_loop(run, optimizer)
    assert largest_difference(weights(run), wanted) <= 1e-6

    events = EventAccumulator(str(run.directory)).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses, rel=1e-5)
    assert [event.value for event in events.Scalars("train/accuracy")] == pytest.approx(accuracies)
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))


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
    wanted, _, _ = plain_loop(run, CASES["sgd"][1])
    assert largest_difference(weights(run), wanted) <= 1e-6


def test_gradients_are_clipped_by_the_norm_of_the_whole_batch(trained):
    run = trained(*COMMON, "accumulation=4", "max_grad_norm=0.1")
    wanted, _, _ = plain_loop(run, CASES["sgd"][1], max_norm=0.1)
    unclipped, _, _ = plain_loop(run, CASES["sgd"][1])
    assert largest_difference(weights(run), wanted) <= 1e-6
    assert largest_difference(unclipped, wanted) > 1e-3


def test_the_schedule_gives_each_step_its_rate(trained):
    run = trained(*COMMON, "schedule=step", "schedule.milestones=[0.4]", "schedule.warmup=0.2")
    rates = [0.025, 0.05] + [0.05] * 4 + [0.005] * 4  # two of warm-up, then 0.4 of the eight that are left
    wanted, _, _ = plain_loop(run, CASES["sgd"][1], learning_rates=rates)
    assert largest_difference(weights(run), wanted) <= 1e-6
    events = EventAccumulator(str(run.directory)).Reload()
    assert [event.value for event in events.Scalars("lr")] == pytest.approx(rates)


def test_double_precision_is_double_throughout(trained):
    run = trained(*COMMON, "precision=64")
    wanted, _, _ = plain_loop(run, CASES["sgd"][1], dtype=torch.float64)
    assert all(tensor.dtype == torch.float64 for tensor in weights(run).values())
    assert largest_difference(weights(run), wanted) <= 1e-13


@pytest.mark.parametrize("precision", ["bf16", "16"])
def test_sixteen_bits_round_but_keep_the_weights_whole(precision, trained):
    run = trained(*COMMON, f"precision={precision}")
    wanted, _, _ = plain_loop(run, CASES["sgd"][1])
    assert all(tensor.dtype == torch.float32 for tensor in weights(run).values())
    assert 1e-6 < largest_difference(weights(run), wanted) < 0.05, "rounded to 16 bits, and not more"


def test_one_seed_gives_one_run_and_another_seed_another(trained):
    runs = [trained(*COMMON, "data.crop=2", f"seed={seed}", directory=f"run{i}") for i, seed in enumerate((3, 3, 4))]
    first, again, other = map(weights, runs)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert largest_difference(first, other) > 0.1


def test_evaluation_is_that_of_the_trained_weights_on_every_held_out_sample(trained):
    run = trained(*COMMON, "workload.eval_batch_size=50")  # 359 samples: the last batch is short
    _, held_out = run.workload.data.load()  # pyright: ignore[reportAttributeAccessIssue]
    model = built("model=tiny", "data.size=8").workload.model.build(held_out.shape, 10)  # pyright: ignore[reportAttributeAccessIssue]
    model.load_state_dict(weights(run))
    outputs = model.eval()(held_out.inputs)
    accuracy = (outputs.argmax(1) == held_out.targets).double().mean().item()
    assert run.result.metrics["eval/accuracy"] == accuracy
    loss = torch.nn.functional.cross_entropy(outputs, held_out.targets).item()
    assert run.result.metrics["eval/loss"] == pytest.approx(loss, rel=1e-5)
