"""Tests of `compile=step`: the same weights as plain PyTorch, one compilation, bitwise resume, refusals in words."""

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import agents, stateful_objects
from helpers import plain_loop as loops
from helpers.compose import TINY_CPU, TrainedRun, build_composed_run, compose_config, prepare_session, train_in
from helpers.rank_functions import sigterm_at
from helpers.runs import assert_bitwise_equal, run_outcome
from torch._dynamo.utils import counters

from runner.config.errors import ConfigError
from runner.precision import Float16
from runner.workloads.classifier import Classifier

STEP = "compile=step"
needs_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch's compiler writes float64 code with vector instructions, which this CPU lacks, and cannot compile it",
)
SMALL = (*TINY_CPU, "model.channels=[2]", "model.hidden=8", *loops.PLAIN_LOOP_OVERRIDES)


def trained(directory: Path, *overrides: str, **options: Any) -> TrainedRun:
    return train_in(directory, build_composed_run(*overrides), **options)


@needs_vectors
@pytest.mark.cases(
    "kinds",
    *(
        pytest.param(n, marks=pytest.mark.slow)
        for n in ("sgd", "nesterov", "adam", "adamw", "groups", "nadam", "rmsprop")
    ),
)
def test_the_weights_are_those_of_a_plain_loop(name, tmp_path):
    """With clipping, in float64, where only the order of sums differs; Adam and its like divide by small gradients."""
    options, optimizer = loops.ALL_OPTIMIZER_CASES[name]
    bounds = {"adam": 1e-11, "kinds": 1e-11, "adamw": 1e-11, "rmsprop": 1e-11, "nadam": 1e-9}
    dtype, bound = torch.float64, bounds.get(name, 1e-13)
    size = TINY_CPU if name in ("groups", "kinds") else SMALL
    precision = f"precision={torch.finfo(dtype).bits}"
    overrides = (*size, *loops.PLAIN_LOOP_OVERRIDES, *options, precision, "max_grad_norm=0.5")
    run = trained(tmp_path, *overrides, STEP)
    wanted = loops.plain_loop(build_composed_run(*overrides), optimizer, loops.PlainSettings(dtype=dtype, max_norm=0.5))
    assert loops.largest_difference(loops.weights_at(tmp_path, loops.STEPS), wanted.weights) <= bound
    curves = run_outcome(run.directory)["curves"]
    assert [value for _, value in curves["train/loss"]] == pytest.approx(wanted.losses, rel=1e-6)


HARD = (
    *(*TINY_CPU, "model.channels=[2]", "model.hidden=8", "model.dropout=0.3", "data.crop=2", "precision=64"),
    *("optimizer.lr=0.05", "optimizer.nesterov=true", "optimizer.weight_decay=0.01", "schedule=cosine"),
    "optimizer.groups={head:{optimizer:adamw,lr:0.003,eps:0.01,schedule:{name:linear,warmup:3}}}",
    *("ema.decay=0.8", "max_grad_norm=0.5", "accumulation=2", "batch_size=24"),
    *("steps=8", "log_every=3", "eval_every=4", "save_every=4"),
)


@needs_vectors
def test_everything_else_is_what_the_loop_computes_and_nothing_is_compiled_twice(tmp_path):
    """Accumulation, dropout, the average, curves and the state of the optimizer; resumed bit for bit, and elsewhere."""
    counters.clear()
    whole = run_outcome(trained(tmp_path / "whole", *HARD, STEP).directory)
    assert counters["stats"]["unique_graphs"] == 2, "for the first micro-batch of a step, and for the last one"
    wanted = run_outcome(trained(tmp_path / "eager", *HARD).directory)
    assert loops.largest_difference(whole["weights"], wanted["weights"]) <= 1e-12
    assert whole["curves"].keys() == wanted["curves"].keys()
    for tag, points in wanted["curves"].items():
        assert whole["curves"][tag] == [(step, pytest.approx(value, rel=1e-5)) for step, value in points], tag
    for name, state in wanted["state"]["optimizer"].items():
        assert loops.largest_difference(whole["state"]["optimizer"][name], state) <= 1e-11, name
    assert_bitwise_equal(whole["local"]["random"], wanted["local"]["random"])

    stopped = tmp_path / "stopped"
    trained(stopped, *HARD, STEP, change=partial(sigterm_at, 6, 0))
    assert max(stopped.glob("checkpoints/step_*")).name == "step_00000006"
    elsewhere = Path(shutil.copytree(stopped, tmp_path / "elsewhere"))
    trained(stopped, *HARD, STEP)
    assert_bitwise_equal(run_outcome(stopped), whole)
    trained(elsewhere, *HARD)
    assert loops.largest_difference(run_outcome(elsewhere)["weights"], wanted["weights"]) <= 1e-12


@needs_vectors
def test_buffers_and_unused_parameters_are_those_of_the_loop(tmp_path):
    class Unused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = torch.nn.BatchNorm2d(1), torch.nn.Linear(64, 10)
            self.unused = torch.nn.Linear(2, 2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(images).flatten(1))

    def with_network(*overrides: str) -> dict[str, torch.Tensor]:
        run = build_composed_run(*SMALL, "precision=64", "optimizer.weight_decay=0.1", *overrides)
        run.workload.build_model = Unused  # type: ignore[method-assign]
        return loops.weights_at(train_in(tmp_path / str(len(overrides)), run).directory, loops.STEPS)

    wanted, got = with_network(), with_network(STEP)
    assert loops.largest_difference(got, wanted) <= 1e-12
    assert torch.equal(got["unused.weight"], wanted["unused.weight"]), "weight decay does not move it, either"
    assert int(got["norm.num_batches_tracked"]) == loops.STEPS


@needs_vectors
@pytest.mark.parametrize(
    "sees", [("model.hidden=[8]",), pytest.param(agents.IMAGES, marks=pytest.mark.slow)], ids=["vectors", "pixels"]
)
def test_an_agent_learns_what_it_learns_without_a_compiler(sees, tmp_path):
    agent = ("workload=dqn", "device=cpu", "precision=64", "optimizer=sgd", "batch_size=16", *sees)
    agent += ("workload.warm_up=200", "optimizer.lr=0.01", "workload.eval_episodes=4", "steps=30", "log_every=10")
    agent += ("eval_every=0", "workload.target_every=3")
    wanted = run_outcome(trained(tmp_path / "eager", *agent).directory)
    counters.clear()
    got = run_outcome(trained(tmp_path / "compiled", *agent, STEP).directory)
    assert counters["stats"]["unique_graphs"] == 1
    assert loops.largest_difference(got["weights"], wanted["weights"]) <= 1e-12
    assert got["curves"].keys() == wanted["curves"].keys()
    for tag in ("train/td_loss", "train/q_mean", "episode/return", "eval/return"):
        assert got["curves"][tag] == [(step, pytest.approx(value, rel=1e-5)) for step, value in wanted["curves"][tag]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ensemble", "hogwild"])
def test_a_process_of_several_computes_what_a_single_one_does(mode, ranks, tmp_path):
    options = (f"parallel={mode}", f"parallel.processes={2 if mode == 'ensemble' else 1}")
    if mode == "ensemble":
        ranks(2).train(compose_config(*SMALL, STEP, *options), tmp_path / "several")
        member = torch.load(
            tmp_path / "several" / f"checkpoints/step_{loops.STEPS:08d}" / "rank_1.pt", weights_only=True
        )
        got = member["parallel"]["tensors"]
    else:
        got = loops.weights_at(trained(tmp_path / "several", *SMALL, STEP, *options).directory, loops.STEPS)
    single = trained(tmp_path / "single", *SMALL, STEP, f"seed={int(mode == 'ensemble')}")
    assert_bitwise_equal(got, loops.weights_at(single.directory, loops.STEPS))


class Printing(Classifier):
    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().criterion(outputs, targets)
        return loss * 2 if loss > 1 else loss  # waits for the value: THE FAULTY LINE


def test_a_workload_that_cannot_be_compiled_is_refused_with_its_file_and_line(tmp_path):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("THE FAULTY LINE"))
    run = build_composed_run(*SMALL, STEP)
    run.workload.__class__ = Printing
    with pytest.raises(ConfigError) as refusal:
        train_in(tmp_path, run)
    assert refusal.value.key == "compile"
    assert f"{__file__}:{number}" in refusal.value.why


@pytest.mark.cases((stateful_objects.CountsSteps, "steps"), (stateful_objects.evolving, "evolves.grown"))
def test_state_that_compiled_code_would_take_for_constant_is_refused(model, name, tmp_path):
    with pytest.raises(ConfigError) as refusal:
        stateful_objects.train_given((STEP, "steps=2", "eval_every=0"), tmp_path, model=model, loss=None)
    assert (refusal.value.key, refusal.value.got) == ("compile", "step")
    assert f"forward changes {name}" in refusal.value.why
    assert "width" not in refusal.value.why, "a size that each pass sets again"


@pytest.mark.cases("ddp", "fsdp", "model", "pipeline", "pipeline parallel.engine=streams")
def test_modes_that_compute_a_step_together_are_refused_before_they_start(mode):
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run(*SMALL, STEP, *f"parallel={mode}".split()))
    assert (refusal.value.key, refusal.value.got) == ("compile", "step")


@pytest.mark.cases(
    (("optimizer=muon",), "optimizer"),
    (("optimizer=torch", "optimizer.name=Adafactor"), "compile"),
    (("+optimizer.options.dampening=0.1",), "optimizer.options"),
    ids=str,
)
def test_optimizers_that_cannot_be_compiled_are_refused(options, key, tmp_path, caplog):
    caplog.set_level("INFO")
    with pytest.raises(ConfigError) as refusal:
        trained(tmp_path, *SMALL, STEP, *options)
    assert refusal.value.key == key
    introduced = any(record.getMessage().startswith("model  ") for record in caplog.records)
    assert introduced == (key == "compile"), "what is known before the first step is refused before it is introduced"


def test_a_toolkit_without_a_gpu_is_no_warning(caplog, monkeypatch):
    log = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    log.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
    log.warning("another one")
    assert [record.getMessage() for record in caplog.records] == ["another one"]


def test_loss_scaling_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Float16, "compute_dtype", lambda *_: torch.float16)
    with pytest.raises(ConfigError, match="loss scaling"):
        trained(tmp_path, *SMALL, STEP, "precision=16")


@pytest.fixture
def without_compiler(tmp_path, monkeypatch) -> Iterator[tuple[str, ...]]:
    """Overrides of a run in which torch finds no compiler."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with config.patch({"cpp.cxx": (str(tmp_path / "nothing"),)}):  # type: ignore[attr-defined]
        yield ("workload=regression", "device=cpu", "device.threads=1", "optimizer=sgd", "model.hidden=[]", STEP)


def test_a_missing_compiler_is_named(without_compiler, tmp_path):
    with pytest.raises(ConfigError) as refusal:
        trained(tmp_path / "run", *without_compiler)
    assert (refusal.value.key, refusal.value.why) == ("compile", "torch finds no C++ compiler")


def test_a_stop_that_ends_the_compiler_too_is_a_stop(without_compiler, tmp_path):
    def stopped(run: Any, session: Any) -> None:
        batches = run.workload.batches

        def signaling(*arguments: Any) -> Any:
            for batch in batches(*arguments):
                os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        run.workload.batches = signaling

    result = trained(tmp_path / "run", *without_compiler, change=stopped).result
    assert (result.status, result.steps) == ("stopped", 0)
