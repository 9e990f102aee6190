"""Tests that every mode has the same weights, metrics and images as training in one process."""

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.events import load_events, scalar_curves
from helpers.narrow_resnet import use_narrow_resnet
from helpers.plain_loop import (
    ALL_OPTIMIZER_CASES,
    OPTIMIZER_CASES,
    PLAIN_LOOP_OVERRIDES,
    PlainResult,
    PlainSettings,
    largest_difference,
    plain_evaluation,
    plain_loop,
    weights_at,
)

from runner.parallel.launch.processes import Launcher
from runner.parallel.session import Session
from runner.run import Run

HALF, STEPS = 3, 5
"""The steps at which a run is evaluated; a wrong computation already shows in the first steps."""
HELD_OUT = ("data.holdout=0.0695", "workload.eval_batch_size=50")
"""Few samples, whose number two and three do not divide: 125."""
COMMON = (*PLAIN_LOOP_OVERRIDES, *HELD_OUT, f"steps={STEPS}", f"eval_every={HALF}")


def freeze(name: str, run: Run, session: Session) -> None:
    """Freeze the module `name` of the network in the same way as `plain_loop`, not by the option `model.freeze`."""
    build = session.workload.build_model

    def frozen() -> torch.nn.Module:
        model = build()
        model.get_submodule(name).requires_grad_(False)
        return model

    session.workload.build_model = frozen


class Row(NamedTuple):
    """A run of a mode, and how close its weights must be to those of the plain loop."""

    mode: str
    processes: int = 1
    accumulation: int = 1
    case: str = "sgd"  # the optimizer, a key of `ALL_OPTIMIZER_CASES`
    more: str = ""  # overrides that also apply to the plain loop
    options: str = ""  # overrides that do not
    tolerance: float = 1e-6  # of the weights, relative: a few rounding errors
    max_norm: float | None = None
    frozen: str = ""  # the name of a module that is not trained
    devices: int = 1  # of one process, all of which are the CPU

    def __str__(self) -> str:
        clip, frozen = f"clip{self.max_norm}" * bool(self.max_norm), f"frozen {self.frozen}" * bool(self.frozen)
        devices = f"{self.devices} devices" * (self.devices > 1)
        words = (self.mode, self.processes, f"acc{self.accumulation}", self.case, self.more, self.options)
        return " ".join(str(word) for word in (*words, clip, frozen, devices) if word != "")


# In float64: most optimizers divide by the size of a gradient, which amplifies the rounding of the smallest; and in a
# deep network, the rounding of float32 can change the sign of some inputs of ReLU. Muon rounds to 16 bits.
DOUBLE = "precision=64"
GROUP = f"model=resnet18 model.norm=group data.size=16 data.holdout=0.02 batch_size=6 {DOUBLE}"
CONVNET_28 = "model=convnet data.size=28"
"""The 20-20-50-10 network on 28×28 digits."""
NARROW = "model.hidden=2 model.channels=[2]"
"""Options for tensors with fewer rows than there are processes, so that some processes hold no rows of them."""
SIX = "model.channels=[8,8,16,16] data.size=16"
"""A network of six blocks, which is enough for two stages in each of three processes."""
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
INTERLEAVED, ZERO_BUBBLE = (f"parallel.schedule={name}" for name in SCHEDULES[2:])
RECOMPUTE = "model.checkpoint_activations=true"

ROWS = [
    Row("dp"),
    Row("dp", 1, 2, max_norm=0.1),  # by the norm of the whole model over the whole batch, as in each mode
    Row("ddp", 2, 2, options="parallel.find_unused=true parallel.gradients_as_views=false"),
    Row("ddp", 2, 1, "adam", DOUBLE, "parallel.static_graph=true", 1e-13),
    Row("ddp", 3, 4, "nesterov", DOUBLE, "parallel.bucket_mb=0.001", 1e-13),
    Row("ddp", 2, 2, "adamw", DOUBLE, "", 1e-13, max_norm=0.1),
    Row("ddp", 2, 2, "muon", DOUBLE, "", 1e-12),
    Row("ddp", 2, 1, more=CONVNET_28, frozen="conv1"),
    Row("ddp", 3, 2, "kinds", f"{NARROW} {DOUBLE}", "", 1e-12),
    Row("ddp", 2, 1, more=GROUP, tolerance=1e-12),
    Row("fsdp", 3, 2, more=NARROW, max_norm=0.1),
    Row("fsdp", 2, 1, "nesterov", DOUBLE, "parallel.reshard_after_forward=false", 1e-13),
    Row("fsdp", 3, 2, "kinds", DOUBLE, "", 1e-12, max_norm=0.1),
    Row("fsdp", 2, 4, "nadam", DOUBLE, "", 1e-12),
    Row("fsdp", 2, 2, "muon", DOUBLE, "", 1e-12),
    Row("fsdp", 2, 2, "rmsprop", DOUBLE, "parallel.offload=true", 1e-12),
    Row("fsdp", 2, 1, more=CONVNET_28, frozen="conv1"),
    Row("fsdp", 2, 1, more=GROUP, tolerance=1e-12),
    Row("model", 1, 1),
    Row("model", 1, 2, devices=2),
    Row("model", 1, 2, "sgd", GROUP, "parallel.cuts=[layer3]", 1e-12, devices=2),
    Row("pipeline", 1, 1, options="parallel.engine=streams parallel.cuts=[conv2,hidden]", frozen="conv1"),
    Row("pipeline", 1, 2, options="parallel.engine=streams", max_norm=0.1, devices=2),
    Row("pipeline", 3, 1, more=SIX, options="channels_last=false"),
    Row("pipeline", 2, 2, "nadam", DOUBLE, "parallel.cuts=[conv2] parallel.split_size=8", 1e-12),
    Row("pipeline", 2, 2, "muon", DOUBLE, "parallel.num_micro_batches=1", 1e-12),
    Row("pipeline", 2, 1, "nesterov", f"batch_size=12 {DOUBLE}", "parallel.schedule=1f1b parallel.split_size=1", 1e-13),
    Row("pipeline", 3, 2, more=SIX, options="parallel.schedule=1f1b", max_norm=0.1),
    Row("pipeline", 2, 2, "kinds", DOUBLE, f"{INTERLEAVED} parallel.split_size=6", 1e-12),
    Row("pipeline", 3, 1, more=SIX, options=f"{INTERLEAVED} {RECOMPUTE} parallel.split_size=8"),
    Row("pipeline", 2, 1, "adamw", DOUBLE, f"{ZERO_BUBBLE} {RECOMPUTE}", 1e-13),
    Row("pipeline", 3, 2, "sgd", GROUP, ZERO_BUBBLE, 1e-12),
]
"""Each mode, or schedule, with each other option at least once."""

COMPILED = [Row("pipeline", 2, options="compile=true"), Row("pipeline", options="compile=true parallel.engine=streams")]
PRODUCT = [
    *(Row(mode, processes, each) for mode in ("ddp", "fsdp") for processes in (2, 3) for each in (1, 2, 4)),
    *(
        Row("pipeline", processes, each, more=SIX, options=f"parallel.schedule={schedule}")
        for schedule, processes, each in itertools.product(SCHEDULES, (2, 3), (1, 2))
    ),
    *COMPILED,
]


@functools.cache
def reference(
    case: str = "sgd", max_norm: float | None = None, more: str = "", frozen: str = ""
) -> tuple[PlainResult, dict[int, tuple[float, float]]]:
    """Return the result of the plain loop, and the loss and accuracy of its evaluations by step."""
    overrides = (*TINY_CPU, *COMMON, *ALL_OPTIMIZER_CASES[case][0], *more.split())
    run = use_narrow_resnet(build_composed_run(*overrides))
    dtype = torch.float64 if DOUBLE in more else torch.float32
    ends = {
        step: plain_loop(
            run, ALL_OPTIMIZER_CASES[case][1], PlainSettings(step, dtype, max_norm=max_norm, frozen=frozen)
        )
        for step in (HALF, STEPS)
    }
    return ends[STEPS], {step: plain_evaluation(run, plain.weights) for step, plain in ends.items()}


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(row, marks=pytest.mark.slow) for row in PRODUCT)], ids=str)
def test_a_mode_equals_a_plain_loop(row, ranks, tmp_path):
    if ZERO_BUBBLE in row.options and row.more == GROUP and torch.__version__ < "2.14":
        pytest.skip("torch before 2.14 crashes: gradients of group normalization from a freed graph")
    plain, evaluations = reference(row.case, row.max_norm, row.more, row.frozen)
    clip = (f"max_grad_norm={row.max_norm}",) if row.max_norm else ()
    overrides = (*TINY_CPU, *COMMON, *ALL_OPTIMIZER_CASES[row.case][0], *row.more.split(), *row.options.split(), *clip)
    overrides += (f"parallel={row.mode}", f"accumulation={row.accumulation}")
    change = functools.partial(freeze, row.frozen) if row.frozen else use_narrow_resnet
    if row.processes > 1 and row not in COMPILED:
        result = ranks(row.processes).train(compose_config(*overrides), tmp_path, change)
    else:  # compiling takes longer than the timeout of `ranks`
        run = build_composed_run(*overrides)
        if row.devices > 1:
            run.parallel.launcher = lambda choice: Launcher([torch.device("cpu")] * row.devices)
        result = train_in(tmp_path, run, change).result
    assert (result.status, result.steps, result.world_size) == ("done", STEPS, row.processes)
    assert largest_difference(weights_at(tmp_path, STEPS), plain.weights) <= row.tolerance

    logged = scalar_curves(tmp_path)
    close = pytest.approx(plain.losses, rel=1e-5), pytest.approx(plain.metrics)
    for tag, values in zip(("train/loss", "train/accuracy"), close, strict=True):
        assert [step for step, _ in logged[tag]] == list(range(1, STEPS + 1))
        assert [value for _, value in logged[tag]] == values
    for place, tag in enumerate(("eval/loss", "eval/accuracy")):
        wanted = [(step, pytest.approx(evaluation[place], rel=1e-5)) for step, evaluation in evaluations.items()]
        assert logged[tag] == wanted
    assert result.metrics["eval/accuracy"] == evaluations[STEPS][1], "every held-out sample, once"


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    """The run directory of a run in one process, with randomly shifted images."""
    return train_ten_steps("parallel=single", tmp_path_factory.mktemp("single"))


def train_ten_steps(mode: str, directory: Path) -> Path:
    """Train as the command does, in processes that the mode starts, and return the run directory."""
    run = build_composed_run(*TINY_CPU, *PLAIN_LOOP_OVERRIDES, *HELD_OUT, "data.crop=2", "eval_every=5", *mode.split())
    return train_in(directory, run).directory


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "pipeline parallel.stages=3"])
def test_processes_that_the_mode_starts_log_the_same_as_one_process(mode, single, tmp_path):
    """Among the curves is the gradient norm, which is that of all processes."""
    train_ten_steps(f"parallel={mode}", tmp_path)
    assert largest_difference(weights_at(tmp_path, 10), weights_at(single, 10)) <= 1e-6
    got, wanted = scalar_curves(tmp_path), scalar_curves(single)
    of_pipeline = {tag for tag in got if tag.startswith("pipeline/")}
    assert bool(of_pipeline) == ("pipeline" in mode)
    assert got.keys() - of_pipeline == wanted.keys() >= {"train/gradient_norm"}, "tags know no mode"
    for tag in wanted:
        if not tag.startswith(("time/", "memory/", "hparams")):
            assert [step for step, _ in got[tag]] == [step for step, _ in wanted[tag]]
            assert [value for _, value in got[tag]] == pytest.approx([value for _, value in wanted[tag]], rel=1e-5)
    assert images(tmp_path) == images(single)
    assert (tmp_path / "log_rank_1.txt").is_file()
    if of_pipeline:
        assert_bubble(tmp_path, got, workers=3, theory=2 / 14)  # twelve micro-batches


def images(directory: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Return a dict from tag to (step, PNG) of each image of an evaluation."""
    read = load_events(directory)
    tags = [tag for tag in read.Tags()["images"] if tag != "pipeline/step"]
    assert set(tags) == {"eval/samples", "eval/misclassified", "eval/confusion", "eval/class_accuracy"}
    return {tag: [(p.step, p.encoded_image_string) for p in read.Images(tag)] for tag in tags}


def assert_bubble(directory: Path, logged: dict[str, list[tuple[int, float]]], workers: int, theory: float) -> None:
    assert [step for step, _ in logged["pipeline/bubble"]] == list(range(1, 11))
    assert [value for _, value in logged["pipeline/bubble_theory"]] == pytest.approx([theory] * 10)
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


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_processes_without_held_out_samples_do_not_hang(mode, trained, ranks, tmp_path):
    overrides = (*PLAIN_LOOP_OVERRIDES, "data.holdout=0.001", "steps=2", "precision=64")
    alone = trained(*overrides, directory="alone")
    assert len(alone.run.workload.held_out) == 2
    got = ranks(3).train(compose_config(*TINY_CPU, *overrides, f"parallel={mode}"), tmp_path / "three")
    assert got.metrics == pytest.approx(alone.result.metrics, rel=1e-6)


SGD = (*COMMON, *OPTIMIZER_CASES["sgd"][0])


def test_16_bit_precision_rounds_as_a_single_process_does(trained, ranks, tmp_path):
    """One process accumulates the same micro-batches. FSDP also rounds parameters that autocast keeps in float32."""
    overrides, plain = (*SGD, "precision=bf16"), reference()[0]
    alone = weights_at(trained(*overrides, "accumulation=2", directory="alone").directory, STEPS)
    for mode, tolerance in (("ddp", 1e-6), ("fsdp", 0.01), ("pipeline parallel.num_micro_batches=2", 1e-6)):
        directory = tmp_path / mode.partition(" ")[0]
        ranks(2).train(compose_config(*TINY_CPU, *overrides, *f"parallel={mode}".split()), directory)
        got = weights_at(directory, STEPS)
        assert all(tensor.dtype == torch.float32 for tensor in got.values())
        assert largest_difference(got, alone) <= tolerance, mode
        assert 1e-6 < largest_difference(got, plain.weights) < 0.05, "rounded to 16 bits, and not more"


def test_with_batch_normalization_fsdp_rounds_to_16_bits_as_ddp_does(ranks, tmp_path):
    overrides = ("model=resnet18", "model.stem=cifar", "data.holdout=0.02", "batch_size=6", "optimizer.lr=0.01")
    for mode in ("ddp", "fsdp"):
        options = ("steps=2", "precision=bf16", "channels_last=false", f"parallel={mode}")
        ranks(2).train(compose_config(*TINY_CPU, *overrides, *options), tmp_path / mode, use_narrow_resnet)
    assert largest_difference(weights_at(tmp_path / "fsdp", 2), weights_at(tmp_path / "ddp", 2)) <= 1e-6
