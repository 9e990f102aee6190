"""Networks of libraries: their first steps in a mode of the runner, and in a plain loop over the library's network."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from helpers.compose import compose_config
from helpers.ranks import Ranks
from runner.config.errors import ConfigError
from runner.parallel.full_state import without_state
from runner.run import Run, build_run
from runner.seeds import derive
from runner.system import memory
from runner.training import prepare, step_function
from runner.verification.verdict import largest_difference

Tensors = dict[str, torch.Tensor]

BATCH, STEPS, CLASSES = 8, 2, 3
LIMIT = 1e-8
SGD = ("optimizer.lr=0.01", "schedule=constant")
DATA = ("data=synthetic", f"data.num_samples={BATCH}", "data.holdout=1", f"data.num_classes={CLASSES}")
SHORT = (f"batch_size={BATCH}", f"steps={STEPS}", "eval_every=0", "precision=64", "device=cpu", "device.threads=1")


class Mode(NamedTuple):
    """Processes and options of a mode; how many passes a step has, and whether they have running statistics each."""

    processes: int
    options: tuple[str, ...]
    passes: int = 1
    own_statistics: bool = False


MODES = {
    "single": Mode(1, ()),
    "accumulation": Mode(1, ("accumulation=2",), 2),
    "ddp": Mode(2, ("parallel=ddp", "parallel.sync_batch_norm=true")),
    "fsdp": Mode(2, ("parallel=fsdp",), 2, True),
    "pipeline": Mode(2, ("parallel=pipeline", "parallel.num_micro_batches=2"), 2),
}


def config_of(mode: str, size: int, *options: str) -> dict[str, Any]:
    return compose_config(*DATA, f"data.size={size}", *SGD, *SHORT, *options, *MODES[mode].options)


def without_dropout(network: nn.Module) -> nn.Module:
    """Return `network`, which draws no random numbers any more: those of processes and micro-batches are others."""
    for module in network.modules():
        for name in {"p", "drop_prob", "drop_rate"} & vars(module).keys():
            if isinstance(vars(module)[name], float):  # not the size of a window
                setattr(module, name, 0.0)
    return network


def trained_on_rank(config: dict[str, Any], file: Path) -> None:
    """Train a run in one of the processes of its mode; rank 0 writes its tensors to `file`."""
    run = build_run(config)
    build: Callable[[], nn.Module] = run.workload.build_model
    vars(run.workload)["build_model"] = lambda: without_dropout(build())
    with run.parallel.launcher(run.device).connect() as process, tempfile.TemporaryDirectory() as directory:
        session = run.prepare(process)
        with run.settings(session.device):
            state = prepare(run, session, Path(directory))
            batches = run.workload.batches(state.model, session.plan, 0, session.device)
            take_step = step_function(state)
            state.model.train()
            for step in session.plan.steps(0, session.num_steps):
                take_step(state, batches, step, False)
            with state.modules.synchronized():
                tensors, _ = run.parallel.full_state(state.model, without_state(state.model))
        if session.rank == 0:
            torch.save(dict(tensors), file)
    del state, batches, take_step, tensors
    memory.reset_peak(session.device)  # which frees them: several processes have a copy of a large network each


class Plain:
    """The library's own network, with the initial weights of a run, and the samples of the run, in float64."""

    def __init__(self, size: int, options: tuple[str, ...], network: nn.Module):
        self.size, self.options = size, options
        self.run: Run = build_run(config_of("single", size, *options))
        self.run.workload.prepare()
        torch.manual_seed(derive(self.run.seed, "weights"))
        initial = self.run.workload.build_model().state_dict()
        network.load_state_dict(initial)
        self.network = without_dropout(network.double().train())
        self.normalizes = any("running_mean" in name for name, _ in network.named_buffers())

    def trained(self, mode: Mode, after_train: Callable[[nn.Module], Any] = lambda network: None) -> Tensors:
        """Return the tensors after a plain loop in which each step has as many passes as those of `mode`."""
        workload: Any = self.run.workload
        samples = next(workload.train.in_order(BATCH, (0, 1), torch.device("cpu")))
        model = copy.deepcopy(self.network)
        passes = mode.passes if self.normalizes else 1
        copies = [model] * passes
        if mode.own_statistics:
            copies = [model, *(copy.deepcopy(model) for _ in range(passes - 1))]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(derive(self.run.seed, "order", step))
            indices = torch.randperm(BATCH, generator=generator)
            optimizer.zero_grad()
            for network, rows in zip(copies, indices.chunk(passes), strict=True):
                if network is not model:
                    with torch.no_grad():
                        for ours, theirs in zip(model.parameters(), network.parameters(), strict=True):
                            theirs.copy_(ours)
                    network.zero_grad()
                after_train(network.train())
                outputs = network(samples.inputs[rows].double())
                (cross_entropy(outputs, samples.targets[rows]) / passes).backward()
                for ours, theirs in zip(model.parameters(), network.parameters(), strict=True):
                    if ours is not theirs and theirs.grad is not None:
                        ours.grad = theirs.grad if ours.grad is None else ours.grad + theirs.grad
            optimizer.step()
        for buffers in zip(*(network.buffers() for network in copies), strict=True):
            if buffers[0].is_floating_point():
                buffers[0].copy_(torch.stack(buffers).mean(0))
        return model.state_dict()


def freeze_statistics(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def check_mode(
    plain: Plain, mode: str, ranks: Ranks, directory: Path, frozen: bool = False, limit: float = LIMIT
) -> None:
    """Check that a mode trains the network of `plain` as a plain loop does; a pipeline may refuse to split it."""
    file, config = directory / f"{mode}.pt", config_of(mode, plain.size, *plain.options)
    try:
        ranks(MODES[mode].processes).call_on_all(trained_on_rank, config, file)
    except ConfigError as error:
        if mode == "pipeline" and "blocks()" in error.why:
            return
        raise
    difference = largest_difference(
        torch.load(file), plain.trained(MODES[mode], freeze_statistics if frozen else lambda network: None)
    )
    file.unlink()
    assert difference.size <= limit, (mode, difference)
