"""Tests that the modes `model` and `pipeline` have the same weights and metrics as a plain PyTorch loop."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.events import load_events, scalar_curves
from helpers.narrow_resnet import narrow_session, use_narrow_resnet
from helpers.plain_loop import (
    ALL_OPTIMIZER_CASES,
    OPTIMIZER_CASES,
    PlainResult,
    PlainSettings,
    largest_difference,
    plain_evaluation,
    plain_loop,
    weights_at,
)
from helpers.plain_loop import PLAIN_LOOP_OVERRIDES as TEN_STEPS
from helpers.rank_functions import overflow_at, sigterm_at
from helpers.ranks import PersistentRanks
from helpers.runs import assert_checkpoint_bitwise_equal, checkpoint_tensors

from runner.parallel.launch.launcher import Launcher
from runner.result import Result
from runner.run import Run, build_run
from runner.session import Session
from runner.training import prepare

STEPS = 5
"""Number of steps of most runs; a wrong computation already shows in the first steps."""
COMMON = (*TEN_STEPS, f"steps={STEPS}")
SIX = ("model.channels=[8,8,16,16]", "data.size=16")
"""A network of six blocks, which is enough for two stages in each of three processes."""
SHORT = 3
RESNET = (
    "model=resnet18",
    "data.size=32",
    "data.holdout=0.02",
    "batch_size=12",
    f"steps={SHORT}",
    "optimizer.lr=0.002",
)
GROUP, DOUBLE = (*RESNET, "model.norm=group"), "precision=64"
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
STREAMS = "parallel.engine=streams"


def low_lr_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.002, momentum=0.9)


@functools.cache
def plain(
    case: str = "sgd", more: tuple[str, ...] = SIX, max_norm: float | None = None, steps: int = STEPS
) -> tuple[PlainResult, tuple[float, float]]:
    """Return the weights and curves of the plain loop, and the loss and accuracy of an evaluation at its end."""
    run = use_narrow_resnet(build_composed_run(*TINY_CPU, *COMMON, *ALL_OPTIMIZER_CASES[case][0], *more))
    kind = torch.float64 if DOUBLE in more else torch.float32
    optimizer = low_lr_sgd if "model=resnet18" in more else ALL_OPTIMIZER_CASES[case][1]
    found = plain_loop(run, optimizer, PlainSettings(max_norm=max_norm, dtype=kind, num_steps=steps))
    return found, plain_evaluation(run, found.weights)


def on_two_devices(run: Run) -> Run:
    """Return `run`, changed so that it uses two devices, both of which are the CPU."""
    run.parallel.launcher = lambda choice: Launcher([torch.device("cpu")] * 2)
    return run


def on_one_device(run: Run) -> Run:
    return run


def run_here(
    directory: Path, *overrides: str, change: Callable[[Run, Session], Any] = lambda run, session: None
) -> Result:
    """Train a run in this process, or in processes that its mode starts, and return the result."""
    return train_in(directory, build_composed_run(*TINY_CPU, *overrides), change).result


# ---------------------------------------------------------------------------------------------------------------------
# Weights, curves and evaluations


ALL = itertools.product(enumerate(SCHEDULES), (2, 3), (1, 2))
PAIRS = [  # those that are not marked `slow` contain all pairs of two options
    pytest.param(schedule, processes, count, marks=[] if (number + processes + count) % 2 else [pytest.mark.slow])
    for (number, schedule), processes, count in ALL
]


@pytest.mark.parametrize(("schedule", "processes", "accumulation"), PAIRS)
def test_a_pipeline_equals_a_plain_loop(
    schedule: str, processes: int, accumulation: int, ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    options = ("parallel=pipeline", f"parallel.schedule={schedule}", f"accumulation={accumulation}")
    overrides = (*COMMON, *OPTIMIZER_CASES["sgd"][0], *SIX, *options, "workload.eval_batch_size=50")
    result = ranks(processes).train(compose_config(*TINY_CPU, *overrides), tmp_path)
    assert (result.status, result.steps, result.world_size) == ("done", STEPS, processes)
    assert_as_plain(tmp_path, result, *plain())


@pytest.mark.parametrize(("stages", "accumulation"), [(2, 2), (3, 1)])
def test_streams_equal_a_plain_loop(stages: int, accumulation: int, tmp_path: Path) -> None:
    options = ("parallel=pipeline", STREAMS, f"parallel.stages={stages}", f"accumulation={accumulation}")
    result = run_here(tmp_path, *COMMON, *OPTIMIZER_CASES["sgd"][0], *SIX, *options)
    assert_as_plain(tmp_path, result, *plain())


@pytest.mark.parametrize(("machine", "accumulation"), [(on_two_devices, 2), (on_one_device, 1)])
def test_model_parallel_equals_a_plain_loop(machine: Callable[[Run], Run], accumulation: int, tmp_path: Path) -> None:
    options = (*SIX, "parallel=model", f"accumulation={accumulation}")
    result = train_in(
        tmp_path, machine(build_composed_run(*TINY_CPU, *COMMON, *OPTIMIZER_CASES["sgd"][0], *options))
    ).result
    assert_as_plain(tmp_path, result, *plain())


@pytest.mark.parametrize(
    ("case", "schedule", "tolerance"),
    [
        ("nadam", "gpipe", 1e-12),
        ("rmsprop", "interleaved_1f1b", 1e-12),
        ("muon", "gpipe", 1e-12),
        ("nesterov", "1f1b", 1e-13),
        ("adamw", "zero_bubble", 1e-13),
    ],
)
def test_optimizers_in_float64_equal_a_plain_loop(
    case: str, schedule: str, tolerance: float, ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    """Adam divides by the size of a gradient, and so amplifies the rounding of the smallest."""
    options = ("parallel=pipeline", f"parallel.schedule={schedule}", "accumulation=2")
    ranks(2).train(compose_config(*TINY_CPU, *COMMON, *ALL_OPTIMIZER_CASES[case][0], *SIX, DOUBLE, *options), tmp_path)
    wanted, _ = plain(case, (*SIX, DOUBLE))
    assert largest_difference(weights_at(tmp_path, STEPS), wanted.weights) <= tolerance


def assert_as_plain(directory: Path, result: Any, wanted: PlainResult, evaluation: tuple[float, float]) -> None:
    assert largest_difference(weights_at(directory, STEPS), wanted.weights) <= 1e-6
    logged = scalar_curves(directory)
    assert [value for _, value in logged["train/loss"]] == pytest.approx(wanted.losses, rel=1e-5)
    assert [value for _, value in logged["train/accuracy"]] == pytest.approx(wanted.accuracies)
    assert result.metrics["eval/loss"] == pytest.approx(evaluation[0], rel=1e-5)
    assert result.metrics["eval/accuracy"] == evaluation[1], "every held-out sample, once"


def test_a_residual_network_with_group_normalization_equals_a_plain_loop(
    ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    """Float64 weights equal those of the plain loop.

    Float32 weights equal those of one device that accumulates over the same micro-batches.
    """
    if torch.__version__ < "2.14":
        pytest.skip("torch before 2.14 crashes: gradients of group normalization from a freed graph")
    options = ("parallel=pipeline", "parallel.schedule=zero_bubble", "accumulation=2")
    ranks(3).train(compose_config(*TINY_CPU, *COMMON, *GROUP, DOUBLE, *options), tmp_path / "exact", narrow_session)
    wanted, _ = plain("sgd", (*GROUP, DOUBLE), None, SHORT)
    assert largest_difference(weights_at(tmp_path / "exact", SHORT), wanted.weights) <= 1e-12

    config = compose_config(*TINY_CPU, *COMMON, *GROUP, *options, "parallel.num_micro_batches=3")
    ranks(3).train(config, tmp_path / "rounded", narrow_session)
    assert largest_difference(weights_at(tmp_path / "rounded", SHORT), in_six_micro_batches()) <= 1e-6


@functools.cache
def in_six_micro_batches() -> dict[str, torch.Tensor]:
    """Return the weights after training on one device that accumulates over six micro-batches."""
    with tempfile.TemporaryDirectory() as directory:
        run_here(Path(directory), *COMMON, *GROUP, "accumulation.steps=6", change=narrow_session)
        return weights_at(Path(directory), SHORT)


def test_a_residual_network_on_two_devices_equals_accumulation_on_one(tmp_path: Path) -> None:
    options = ("accumulation.steps=6", "parallel=model", "parallel.cuts=[layer3]")
    train_in(tmp_path, on_two_devices(build_composed_run(*TINY_CPU, *COMMON, *GROUP, *options)), narrow_session)
    assert largest_difference(weights_at(tmp_path, SHORT), in_six_micro_batches()) <= 1e-6


@pytest.mark.parametrize(
    "options",
    [
        ("channels_last=false",),
        ("model.checkpoint_activations=true",),
        ("model.checkpoint_activations=true", "parallel.schedule=zero_bubble"),
        ("parallel.cuts=[conv2]", "parallel.split_size=16"),
        ("parallel.num_micro_batches=1",),
        ("parallel.split_size=1", "parallel.schedule=gpipe"),
    ],
    ids=" ".join,
)
def test_partition_and_memory_options_change_nothing(
    options: tuple[str, ...], ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    result = ranks(2).train(
        compose_config(*TINY_CPU, *COMMON, *OPTIMIZER_CASES["sgd"][0], *SIX, "parallel=pipeline", *options), tmp_path
    )
    assert_as_plain(tmp_path, result, *plain())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "streams"])
def test_compiled_stages_equal_a_plain_loop(engine: str, tmp_path: Path) -> None:
    """The runs do not use `PersistentRanks`, because compiling takes longer than its timeout."""
    options = ("compile=true", "parallel=pipeline", f"parallel.engine={engine}")
    assert_as_plain(tmp_path, run_here(tmp_path, *COMMON, *OPTIMIZER_CASES["sgd"][0], *SIX, *options), *plain())


# ---------------------------------------------------------------------------------------------------------------------
# Gradient norm and overflow across stages


@pytest.mark.parametrize("processes", [3, 1])
def test_gradients_are_clipped_by_the_norm_of_all_stages(
    processes: int, ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    overrides = (*COMMON, *OPTIMIZER_CASES["sgd"][0], *SIX, "parallel=pipeline", "max_grad_norm=0.1")
    if processes == 1:
        run_here(tmp_path, *overrides, STREAMS)
    else:
        ranks(processes).train(compose_config(*TINY_CPU, *overrides), tmp_path)
    assert largest_difference(weights_at(tmp_path, STEPS), plain("sgd", SIX, 0.1)[0].weights) <= 1e-6


def test_middle_stages_read_no_samples_and_only_the_first_one_evaluates(
    ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    config = compose_config(*TINY_CPU, *COMMON, *OPTIMIZER_CASES["sgd"][0], *SIX, "parallel=pipeline")
    result = ranks(3).train(config, tmp_path, read_as_little_as_possible)
    assert (result.status, result.steps) == ("done", STEPS)
    assert largest_difference(weights_at(tmp_path, STEPS), plain("sgd", SIX)[0].weights) <= 1e-6


def read_as_little_as_possible(run: Run, session: Session) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("reads samples")

    if session.rank == 1:
        session.workload.batches = read  # pyright: ignore[reportAttributeAccessIssue]
    if session.rank > 0:
        session.workload.evaluate = read  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("log_every", [1, 100])
def test_all_stages_skip_an_update_if_a_gradient_of_one_stage_overflows(
    log_every: int, ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    overrides = (
        *TEN_STEPS,
        *OPTIMIZER_CASES["sgd"][0],
        *SIX,
        "precision=16",
        f"log_every={log_every}",
        "schedule=onecycle",
    )
    run_here(tmp_path / "one", *overrides, "accumulation=8", change=partial(overflow_at, 2))
    config = compose_config(*TINY_CPU, *overrides, "parallel=pipeline", "parallel.num_micro_batches=8")
    ranks(2).train(config, tmp_path / "two", partial(overflow_at, 2))
    assert largest_difference(weights_at(tmp_path / "two", 10), weights_at(tmp_path / "one", 10)) <= 1e-6
    for tag, last in (("train/skipped_steps", 1.0), ("train/loss_scale", 512.0)):
        logged = [scalar_curves(tmp_path / name)[tag] for name in ("one", "two")]
        assert logged[0] == logged[1]
        assert logged[0][-1][1] == last


@pytest.mark.parametrize("precision", ["bf16", "16"])
def test_16_bit_precision_rounds_as_in_one_process(
    precision: str, ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    overrides = (*COMMON, *OPTIMIZER_CASES["sgd"][0], *SIX, f"precision={precision}")
    run_here(tmp_path / "one", *overrides, "accumulation=8")
    two = compose_config(*TINY_CPU, *overrides, "parallel=pipeline", "parallel.num_micro_batches=8")
    ranks(2).train(two, tmp_path / "two")
    got, alone = (weights_at(tmp_path / name, STEPS) for name in ("two", "one"))
    assert all(tensor.dtype == torch.float32 for tensor in got.values())
    assert largest_difference(got, alone) <= 1e-6
    assert 1e-6 < largest_difference(got, plain()[0].weights) < 0.05, "rounded to 16 bits, and not more"


# ---------------------------------------------------------------------------------------------------------------------
# Batch normalization

BATCH_NORM = (*COMMON, *RESNET, DOUBLE)


RESNET50 = (*COMMON, "model=resnet50", *RESNET[1:], DOUBLE)


@pytest.mark.parametrize(
    ("network", "options"),
    [(RESNET50, ("parallel.processes=2",)), (BATCH_NORM, (STREAMS,))],
    ids=["resnet50 in two processes", "resnet18 in streams"],
)
def test_batch_normalization_uses_the_statistics_of_each_micro_batch(
    network: tuple[str, ...], options: tuple[str, ...], ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    """Weights and running statistics equal those of one device that accumulates over the same micro-batches."""
    run_here(tmp_path / "one", *network, "steps=2", "accumulation.steps=3", change=narrow_session)
    overrides = ("steps=2", "parallel=pipeline", "parallel.split_size=4", *options)
    if STREAMS in options:
        run_here(tmp_path / "two", *network, *overrides, change=narrow_session)
    else:
        ranks(2).train(compose_config(*TINY_CPU, *network, *overrides), tmp_path / "two", narrow_session)
    assert largest_difference(weights_at(tmp_path / "two", 2), weights_at(tmp_path / "one", 2)) <= 1e-13


def test_deferred_statistics_are_those_of_the_whole_batch(
    ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    """The test compares running means and variances only in the first layer.

    The inputs of later layers depend on how the batch is split into micro-batches. In all layers, a
    step counts as one tracked batch.
    """
    run_here(tmp_path / "one", *BATCH_NORM, "steps=1", change=narrow_session)
    options = ("steps=1", "parallel=pipeline", "parallel.batch_norm=defer", "accumulation=2", "parallel.split_size=2")
    more = ("model.checkpoint_activations=true",)  # the forward pass runs twice, but counts once
    ranks(2).train(compose_config(*TINY_CPU, *BATCH_NORM, *options, *more), tmp_path / "two", narrow_session)
    whole, parts = (weights_at(tmp_path / name, 1) for name in ("one", "two"))
    for name in ("bn1.running_mean", "bn1.running_var"):
        assert torch.allclose(parts[name], whole[name], rtol=1e-12, atol=1e-15)
    assert parts.keys() == whole.keys()
    assert {int(tensor) for name, tensor in parts.items() if name.endswith("num_batches_tracked")} == {1}


# ---------------------------------------------------------------------------------------------------------------------
# Logs, parameters of each process, and divergence


def test_a_pipeline_logs_the_same_curves_as_a_single_process(tmp_path: Path) -> None:
    """Among them is the gradient norm, which is that of all stages."""
    overrides = (*TINY_CPU, *TEN_STEPS, *SIX, "data.crop=2", "eval_every=5", "log_every=5")
    for name, mode in (("one", "parallel=single"), ("three", "parallel=pipeline parallel.stages=3")):
        result = train_in(tmp_path / name, build_composed_run(*overrides, *mode.split())).result
    assert result.world_size == 3
    got, wanted = scalar_curves(tmp_path / "three"), scalar_curves(tmp_path / "one")
    own = {tag for tag in got if tag.startswith("pipeline/")}
    assert got.keys() - own == wanted.keys() >= {"train/gradient_norm"}, "tags know no mode"
    for tag in wanted:
        if not tag.startswith(("time/", "memory/", "hparams")):
            assert [value for _, value in got[tag]] == pytest.approx([value for _, value in wanted[tag]], rel=1e-5)
    assert_bubble(tmp_path / "three", got, workers=3, theory=2 / 14)  # twelve micro-batches
    assert not (tmp_path / "one" / "pipeline.png").exists()


def assert_bubble(directory: Path, logged: dict[str, list[tuple[int, float]]], workers: int, theory: float) -> None:
    assert [step for step, _ in logged["pipeline/bubble"]] == [5, 10]
    assert [value for _, value in logged["pipeline/bubble_theory"]] == pytest.approx([theory] * 2)
    for place, (_, share) in enumerate(logged["pipeline/bubble"]):
        spans = [
            [logged[f"pipeline/worker_{worker}_{kind}"][place][1] for kind in ("busy", "idle")]
            for worker in range(workers)
        ]
        whole = sum(spans[0])
        assert all(sum(pair) == pytest.approx(whole, rel=1e-4) for pair in spans)
        assert share == pytest.approx(1 - sum(busy for busy, _ in spans) / (workers * whole), abs=1e-4)
        assert 0 <= logged["pipeline/bubble_bound"][place][1] <= share < 1
    picture = load_events(directory).Images("pipeline/step")
    assert [each.step for each in picture] == [5, 10]
    assert (directory / "pipeline.png").read_bytes()[:8] == picture[-1].encoded_image_string[:8]


@pytest.mark.parametrize("options", [(), ("parallel.schedule=interleaved_1f1b",)], ids=" ".join)
def test_each_process_holds_only_its_own_stages(
    options: tuple[str, ...], ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    names = ranks(2).call_on_all(
        names_held, compose_config(*TINY_CPU, *COMMON, *SIX, "parallel=pipeline", *options), tmp_path
    )
    build = build_composed_run(*TINY_CPU, *SIX).workload.model.build  # type: ignore[attr-defined]
    everything = {name for name, _ in build((1, 16, 16), 10).named_parameters()}
    assert set(names[0]) | set(names[1]) == everything
    assert not set(names[0]) & set(names[1])
    assert all(names)


def names_held(config: dict[str, Any], directory: Path) -> list[str]:
    """Return the names of this process's parameters, after asserting that its optimizer updates the same parameters."""
    directory.mkdir(exist_ok=True)
    run = build_run(config)
    with run.parallel.launcher(run.device).connect() as process:
        state = prepare(run, run.prepare(process), directory)
    held = dict(state.model.named_parameters())
    assert {id(p) for group in state.optimizer.param_groups for p in group["params"]} == {id(p) for p in held.values()}
    return list(held)


def test_a_loss_that_is_not_finite_stops_all_processes(ranks: Callable[[int], PersistentRanks], tmp_path: Path) -> None:
    overrides = (*COMMON, *SIX, "parallel=pipeline", "optimizer.lr=1000", "steps=30")
    result = ranks(2).train(compose_config(*TINY_CPU, *overrides), tmp_path)
    assert result.status == "diverged"
    assert "is not finite at step" in result.error


# ---------------------------------------------------------------------------------------------------------------------
# Resume in another mode

MODES = {
    "single": ("parallel=single",),
    "ddp": ("parallel=ddp",),
    "pipeline": ("parallel=pipeline",),
    "interleaved": ("parallel=pipeline", "parallel.schedule=interleaved_1f1b", "parallel.batch_norm=defer"),
    "streams": ("parallel=pipeline", STREAMS),
}
MODE_SEQUENCES = [
    ("adamw", "pipeline", "ddp", "single"),
    ("sgd", "single", "pipeline", "interleaved"),
    ("adamw", "ddp", "interleaved", "streams"),
    ("sgd", "streams", "pipeline", "pipeline"),
]


@pytest.mark.parametrize("way", MODE_SEQUENCES, ids=" ".join)
def test_a_run_resumes_in_any_mode(
    way: tuple[str, ...], ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    (case, *modes), more = way, (*SIX, DOUBLE)
    for steps, mode in zip((1, 3, STEPS), modes, strict=True):
        overrides = (*COMMON, *OPTIMIZER_CASES[case][0], *more, *MODES[mode], f"steps={steps}", "accumulation=2")
        if mode in ("single", "streams"):
            run_here(tmp_path, *overrides)
        else:
            ranks(2).train(compose_config(*TINY_CPU, *overrides), tmp_path)
    assert largest_difference(weights_at(tmp_path, STEPS), plain(case, more)[0].weights) <= 1e-13


def test_batch_normalization_resumes_in_stages_that_are_cut_elsewhere(
    ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    overrides = (*COMMON, *RESNET, DOUBLE, "parallel=pipeline", "parallel.batch_norm=defer")

    def train(directory: Path, steps: int, cut: str) -> None:
        more = (f"steps={steps}", f"parallel.cuts=[{cut}]")
        ranks(2).train(compose_config(*TINY_CPU, *overrides, *more), directory)

    train(tmp_path / "whole", 2, "layer2.0")
    train(tmp_path / "resumed", 1, "layer2.0")
    train(tmp_path / "resumed", 2, "layer3.1")
    weights = [weights_at(tmp_path / name, 2) for name in ("whole", "resumed")]
    assert largest_difference(weights[1], weights[0]) <= 1e-13


def test_resume_of_a_pipeline_after_a_stop_signal_is_bitwise_exact(
    ranks: Callable[[int], PersistentRanks], tmp_path: Path
) -> None:
    config = compose_config(*TINY_CPU, *COMMON, *SIX, *MODES["pipeline"], "data.crop=2", "steps=12", "log_every=50")
    ranks(2).train(config, tmp_path / "whole")
    stopped = ranks(2).train(config, tmp_path / "stopped", partial(sigterm_at, 5, 1))
    assert (stopped.status, stopped.steps) == ("stopped", 6), "a step later: see `ProcessGroup.any_rank`"
    ranks(2).train(config, tmp_path / "stopped")
    assert_checkpoint_bitwise_equal(tmp_path / "stopped", checkpoint_tensors(tmp_path / "whole"))
