"""Tests that dp, ddp and fsdp have the same weights, metrics and images as training in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.events import load_events, scalar_curves
from helpers.narrow_resnet import narrow_session, use_narrow_resnet
from helpers.plain_loop import (
    ALL_OPTIMIZER_CASES,
    OPTIMIZER_CASES,
    PLAIN_LOOP_OVERRIDES,
    STEPS,
    PlainResult,
    PlainSettings,
    largest_difference,
    plain_evaluation,
    plain_loop,
    weights_at,
)
from helpers.ranks import PersistentRanks

from runner.run import Run
from runner.session import Session

HALF = STEPS // 2


def freeze(name: str, run: Run, session: Session) -> None:
    """Freeze the module `name` of the network in the same way as `plain_loop`, not by the option `model.freeze`."""
    build = session.workload.build_model

    def frozen() -> torch.nn.Module:
        model = build()
        model.get_submodule(name).requires_grad_(False)
        return model

    session.workload.build_model = frozen


# ---------------------------------------------------------------------------------------------------------------------
# Weights, curves and evaluations, compared with a plain PyTorch loop


class Row(NamedTuple):
    """A run of a mode, and how close its weights must be to those of the plain loop.

    Args:
        case: the optimizer, a key of `ALL_OPTIMIZER_CASES`.
        more: overrides that also apply to the plain loop.
        options: overrides that do not apply to the plain loop.
        frozen: the name of a module that is not trained.
        tolerance: relative tolerance of the weights: a few rounding errors, such as 1e-6 in float32.
    """

    mode: str
    processes: int = 1
    accumulation: int = 1
    case: str = "sgd"
    max_norm: float | None = None
    more: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    frozen: str = ""
    tolerance: float = 1e-6

    def __str__(self) -> str:
        frozen = f"frozen {self.frozen}" if self.frozen else ""
        words = (self.mode, self.processes, f"acc{self.accumulation}", self.case, *self.more, *self.options, frozen)
        return " ".join(str(word) for word in (*words, f"clip{self.max_norm}" if self.max_norm else "") if word != "")


SHORT = 3
DOUBLE = ("precision=64",)
GROUP = ("model=resnet18", "model.norm=group", "data.size=16", "data.holdout=0.02", "batch_size=6")
GROUP += (f"steps={SHORT}", *DOUBLE)
CONVNET_28 = ("model=convnet", "data.size=28")
"""The 20-20-50-10 network on 28×28 digits."""
NARROW = ("model.hidden=2", "model.channels=[2]")
"""Options for tensors with fewer rows than there are processes, so that some processes hold no rows of them."""
DDP, FSDP = ("ddp", 2), ("fsdp", 3)

MODES = (("dp", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3))
PRODUCT = [Row(*mode, accumulation) for mode in MODES for accumulation in (1, 2, 4)]
"""All pairs of a mode and an accumulation; by default, one for each mode, with each accumulation."""

ROWS = [
    *(Row(*mode, (1, 2, 4)[number % 3]) for number, mode in enumerate(MODES)),
    # In float64, because Adam divides by the size of a gradient, and so amplifies the rounding of the smallest.
    *(Row(*mode, 2, case, more=DOUBLE, tolerance=1e-13) for mode in (DDP, FSDP) for case in ("nesterov", "adamw")),
    *(Row(*FSDP, 2, case, more=DOUBLE, tolerance=1e-12) for case in ("nadam", "rmsprop")),
    Row(*DDP, 2, "muon", more=DOUBLE, tolerance=1e-12),
    Row(*DDP, 1, "adam", tolerance=2e-6),
    # Gradients are clipped by the norm of the whole model over the whole batch.
    *(Row(*mode, 2, max_norm=0.1) for mode in (("dp", 1), DDP, FSDP)),
    *(Row(*mode, 1, more=CONVNET_28) for mode in (DDP, FSDP)),
    # In float64: in such a deep network, the rounding of float32 can change the sign of some inputs of ReLU.
    *(Row(*mode, 1, more=GROUP, tolerance=1e-12) for mode in (DDP, FSDP)),
    *(Row(*mode, 2, frozen="conv1") for mode in (DDP, FSDP)),
    Row(*FSDP, 2, more=NARROW, max_norm=0.1),
    Row(*DDP, 2, more=NARROW),
    *(
        Row(*DDP, accumulation, options=options)
        for options, accumulation in {
            ("parallel.bucket_mb=0.001",): 2,
            ("parallel.static_graph=true",): 1,
            ("parallel.gradients_as_views=false",): 2,
            ("parallel.find_unused=true",): 2,
        }.items()
    ),
    *(Row("fsdp", 2, 2, options=(f"parallel.{option}",)) for option in ("reshard_after_forward=false", "offload=true")),
]


@functools.cache
def reference(
    case: str, max_norm: float | None, more: tuple[str, ...], frozen: str
) -> tuple[PlainResult, dict[int, tuple[float, float]]]:
    """Return the result of the plain loop, and a dict from step to the (loss, accuracy) of the evaluation at this step.

    The dict has two steps: one in the middle or near the end of the loop, and the last one.
    """
    run, dtype = plain_run(case, more), torch.float64 if DOUBLE[0] in more else torch.float32
    steps, half = (SHORT, SHORT - 1) if more == GROUP else (STEPS, HALF)
    ends = {
        step: plain_loop(
            run, ALL_OPTIMIZER_CASES[case][1], PlainSettings(step, dtype, max_norm=max_norm, frozen=frozen)
        )
        for step in (half, steps)
    }
    return ends[steps], {step: plain_evaluation(run, plain.weights) for step, plain in ends.items()}


def plain_run(case: str, more: tuple[str, ...]) -> Run:
    return use_narrow_resnet(build_composed_run(*TINY_CPU, *PLAIN_LOOP_OVERRIDES, *ALL_OPTIMIZER_CASES[case][0], *more))


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.slow) for row in PRODUCT if row not in ROWS)], ids=str
)
def test_a_mode_equals_a_plain_loop(row: Row, trained, ranks: Callable[[int], PersistentRanks], tmp_path: Path) -> None:
    plain, evaluations = reference(row.case, row.max_norm, row.more, row.frozen)
    half, steps = evaluations
    clip = (f"max_grad_norm={row.max_norm}",) if row.max_norm else ()
    overrides = (*PLAIN_LOOP_OVERRIDES, *ALL_OPTIMIZER_CASES[row.case][0], *row.more, *row.options, *clip)
    overrides += (f"parallel={row.mode}", f"accumulation={row.accumulation}", f"eval_every={half}")
    directory = tmp_path / "run"
    if row.processes == 1:
        result = trained(*overrides).result
    else:
        change = functools.partial(freeze, row.frozen) if row.frozen else narrow_session
        result = ranks(row.processes).train(compose_config(*TINY_CPU, *overrides), directory, change)
    assert (result.status, result.steps, result.world_size) == ("done", steps, row.processes)
    assert largest_difference(weights_at(directory, steps), plain.weights) <= row.tolerance

    logged = scalar_curves(directory)
    close = pytest.approx(plain.losses, rel=1e-5), pytest.approx(plain.accuracies)
    for tag, values in zip(("train/loss", "train/accuracy"), close, strict=True):
        assert [step for step, _ in logged[tag]] == list(range(1, steps + 1))
        assert [value for _, value in logged[tag]] == values
    for place, tag in enumerate(("eval/loss", "eval/accuracy")):
        wanted = [(step, pytest.approx(evaluation[place], rel=1e-5)) for step, evaluation in evaluations.items()]
        assert logged[tag] == wanted
    assert result.metrics["eval/accuracy"] == evaluations[steps][1], "every held-out sample, once"


# ---------------------------------------------------------------------------------------------------------------------
# Curves and images, compared with a run in one process


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run in one process, with randomly shifted images."""
    return train_ten_steps("parallel=single", tmp_path_factory.mktemp("single"))


def train_ten_steps(mode: str, directory: Path) -> Path:
    """Train as the command does, in processes that the mode starts, and return the run directory."""
    run = build_composed_run(
        *TINY_CPU, *PLAIN_LOOP_OVERRIDES, "data.crop=2", "eval_every=5", "workload.eval_batch_size=50", mode
    )
    return train_in(directory, run).directory


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_processes_that_the_mode_starts_log_the_same_as_one_process(mode: str, single: Path, tmp_path: Path) -> None:
    train_ten_steps(f"parallel={mode}", tmp_path)
    assert largest_difference(weights_at(tmp_path, STEPS), weights_at(single, STEPS)) <= 1e-6
    got, wanted = scalar_curves(tmp_path), scalar_curves(single)
    assert got.keys() == wanted.keys(), "tags know no mode"
    for tag in wanted:
        if not tag.startswith(("time/", "memory/", "hparams")):
            assert [step for step, _ in got[tag]] == [step for step, _ in wanted[tag]]
            assert [value for _, value in got[tag]] == pytest.approx([value for _, value in wanted[tag]], rel=1e-5)
    assert images(tmp_path) == images(single)
    assert (tmp_path / "log_rank_1.txt").is_file()


def images(directory: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Return a dict from tag to (step, PNG) of each image."""
    read = load_events(directory)
    found = {tag: [(p.step, p.encoded_image_string) for p in read.Images(tag)] for tag in read.Tags()["images"]}
    assert found.keys() == {"eval/samples", "eval/misclassified", "eval/confusion", "eval/class_accuracy"}
    return found


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_processes_without_held_out_samples_do_not_hang(
    mode: str, trained, ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    overrides = (*PLAIN_LOOP_OVERRIDES, "data.holdout=0.001", "steps=2", "precision=64")
    alone = trained(*overrides, directory="alone")
    assert len(alone.run.workload.held_out) == 2
    got = ranks(3).train(compose_config(*TINY_CPU, *overrides, f"parallel={mode}"), tmp_path / "three")
    assert got.metrics == pytest.approx(alone.result.metrics, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# 16-bit precision


@pytest.mark.parametrize(("mode", "tolerance"), [("ddp", 1e-6), ("fsdp", 0.01)])
@pytest.mark.parametrize("precision", ["bf16", "16"])
def test_16_bit_precision_rounds_as_a_single_process_does(
    mode: str, tolerance: float, precision: str, trained, ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    """Two processes are compared with one process that accumulates the gradients of the same two micro-batches.

    The tolerance is larger for FSDP, which also rounds parameters that autocast keeps in float32.
    """
    overrides = (*PLAIN_LOOP_OVERRIDES, *OPTIMIZER_CASES["sgd"][0], f"precision={precision}")
    alone = weights_at(trained(*overrides, "accumulation=2", directory="alone").directory, STEPS)
    ranks(2).train(compose_config(*TINY_CPU, *overrides, f"parallel={mode}"), tmp_path / "two")
    got, (plain, _) = weights_at(tmp_path / "two", STEPS), reference("sgd", None, (), "")
    assert all(tensor.dtype == torch.float32 for tensor in got.values())
    assert largest_difference(got, alone) <= tolerance
    assert 1e-6 < largest_difference(got, plain.weights) < 0.05, "rounded to 16 bits, and not more"


def test_with_batch_normalization_fsdp_rounds_to_16_bits_as_ddp_does(
    ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    overrides = ("model=resnet18", "model.stem=cifar", "data.holdout=0.02", "batch_size=6", "optimizer.lr=0.01")
    for mode in ("ddp", "fsdp"):
        options = ("steps=2", "precision=bf16", "channels_last=false", f"parallel={mode}")
        ranks(2).train(compose_config(*TINY_CPU, *overrides, *options), tmp_path / mode, narrow_session)
    assert largest_difference(weights_at(tmp_path / "fsdp", 2), weights_at(tmp_path / "ddp", 2)) <= 1e-6
