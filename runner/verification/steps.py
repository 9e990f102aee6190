"""Functions that train the first steps of a run for `runner verify`, and record their samples and tensors.

Workloads and parallel modes contain no code for this: samples are recorded when the workload yields them, and losses
when the mode calls the workload to compute them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from runner.batching import Plan
from runner.config.errors import ConfigError, check
from runner.config.schema import component_fields
from runner.data.base import shard_bounds
from runner.parallel.collectives import Collectives
from runner.parallel.full_state import full_tensor
from runner.precision import Double
from runner.result import Result
from runner.run import Run, build_run
from runner.seeds import random_state
from runner.session import Session
from runner.state import State
from runner.tracking.metrics import BatchSums, DivergedError, MetricSums
from runner.training import prepare, refused_by_torch, train_step
from runner.verification.samples import sample_hashes
from runner.workloads.base import SupervisedWorkload, Workload

Tensors = dict[str, torch.Tensor]

_BATCH_NORM = """Batch normalization computes its statistics on each micro-batch of a process, so this config is
expected to differ. To avoid this, type parallel=ddp parallel.sync_batch_norm=true and no accumulation, or choose a
network without batch normalization (model.norm=group)."""
_RANDOM_NUMBERS = """The network draws random numbers in training (dropout). Processes and micro-batches draw other
numbers than a single device, so this config is expected to differ. Without dropout it can be compared."""


@dataclass
class Steps:
    """A record of the first steps of a run: the samples on which they trained, and the tensors that they computed.

    Args:
        samples: for each step, the sorted hashes of the samples of all processes, or an empty list if the batches have
            no tensor with a row per sample.
        tensors: the tensors by kind (see `KINDS` in `verify_verdict`), and then by name; empty if the run diverged.
        computes_below_float64: whether a loss was computed from tensors of fewer than 64 bits despite precision=64.
        expected: the reason why the results are expected to differ from those of a single device; empty if they are
            not expected to differ.
        diverged: a message that says which value was not finite; empty if all values were finite.
    """

    samples: list[list[str]] = field(default_factory=list)
    tensors: dict[str, Tensors] = field(default_factory=dict)
    computes_below_float64: bool = False
    expected: str = ""
    diverged: str = ""


def first_steps(runs: Sequence[Run]) -> list[Steps]:
    """Train the first steps of all runs in the same processes, and return their records in the order of `runs`.

    The runs must differ only in their precision. If the device does not support float64, runs in float64 are left out.

    Raises:
        ConfigError: if a run is refused, if a single device cannot compute the same results, or if all runs are in
            float64 and the device does not support it.
        RankError: if a process fails.
    """
    launcher = runs[0].parallel.launcher(runs[0].device)
    with tempfile.TemporaryDirectory(prefix="runner-verify-") as scratch, launcher.connect() as collectives:
        devices = collectives.devices
        directory, possible = Path(scratch), [run for run in runs if _has_format(run, devices[0])] or runs
        session = possible[-1].prepare(collectives)  # the largest, in float64: a mode may allocate memory for its model
        check_comparable(possible[-1], session)
        configs = [run.config for run in possible]
        rank_main = partial(record_runs, configs, directory)
        launcher.launch(partial(rank_main, collectives), rank_main, session, directory)
        files = (directory / f"{number}.pt" for number in range(len(configs)))
        return [Steps(**torch.load(file, weights_only=True)) for file in files]


def _has_format(run: Run, device: torch.device) -> bool:
    try:
        run.precision.check_device(device)
    except ConfigError:
        return not isinstance(run.precision, Double)
    return True


def check_comparable(run: Run, session: Session) -> None:
    """Check that a single device can compute the same results as `run`.

    Raises:
        ConfigError: if a single device cannot compute the same results.
    """
    why, processes = run.parallel.difference, session.world_size
    check(not why or processes == 1, "parallel.processes", processes, why, "parallel.processes=1 can be compared")
    has_own_envs = "env" in component_fields(type(run.workload)) and session.plan.num_data_ranks > 1
    why = "each process trains on transitions from its own environments"
    check(not has_own_envs, "parallel", "several processes", why, "compare accumulation or precision instead")


def record_runs(configs: Sequence[dict[str, Any]], directory: Path, collectives: Collectives) -> Result:
    """Train the first steps of the run of each config. Rank 0 saves the record of config i in the file `i.pt`.

    Args:
        configs: the configs of the runs.
        directory: the directory for the files.
        collectives: those of this process.

    Raises:
        ConfigError: if torch cannot train with one of the configs.
    """
    for number, config in enumerate(configs):
        run = build_run(config)
        session = run.prepare(collectives)
        with run.settings(session.device):
            try:
                steps = record(run, session, directory)
            except DivergedError as error:  # raised on all ranks, because the losses are reduced over all ranks
                steps = Steps(diverged=str(error))
            except Exception as error:
                if (refusal := refused_by_torch(run, error)) is not None:
                    raise refusal from error
                raise
        if session.rank == 0:
            torch.save(vars(steps), directory / f"{number}.pt")
    return Result("done")


def record(run: Run, session: Session, directory: Path) -> Steps:
    """Train the first steps of a run, and return their record. On rank 0, the record covers all ranks.

    Args:
        run: the run.
        session: its session in this process.
        directory: a directory without checkpoints, used as the run directory.

    Raises:
        DivergedError: if a loss is not finite.
    """
    collectives = session.collectives
    state = prepare(run, session, directory)
    recorder = Recorder(session, state)
    batches = recorder.watched(run.workload.batches(state.model, session.plan, 0, session.device))
    state.model.train()
    for step in session.plan.steps(0, session.num_steps):
        recorder.begin_step()
        train_step(state, batches, step, log_due=True)
    losses = state.metric_buffer.peek(collectives.all_reduce)[:, 0] / run.batch_size

    tensors = {
        "loss per sample": recorder.all_losses(),
        "loss": _by_step(losses),
        "gradients": recorder.all_gradients(),
    }
    evaluation = evaluated(state)
    full, _ = run.parallel.full_state(state.model, state.optimizer)
    names = {
        name for of_rank in collectives.all_gather([n for n, _ in state.model.named_parameters()]) for name in of_rank
    }
    tensors["weights"] = {name: tensor for name, tensor in full.items() if name in names}
    tensors["buffers"] = {name: tensor for name, tensor in full.items() if name not in names}
    tensors["evaluation"] = evaluation
    return Steps(recorder.all_samples(), tensors, recorder.computes_below_float64, _expected(state, recorder))


def _expected(state: State, recorder: Recorder) -> str:
    """Return why a difference between this run and a single device is expected; empty if no difference is expected."""
    session, plan = state.session, state.session.plan
    num_passes = plan.accumulation * plan.chunks
    num_passes *= 1 if getattr(state.run.parallel, "sync_batch_norm", False) else plan.num_data_ranks
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    normalizes = num_passes > 1 and any(isinstance(module, batch_norm) for module in state.model.modules())
    draws = recorder.drew_random_numbers()
    reasons = {_BATCH_NORM: normalizes, _RANDOM_NUMBERS: draws}
    return "\n".join(text for text, holds in reasons.items() if any(session.collectives.all_gather(holds)))


def _by_step(values: torch.Tensor | list[torch.Tensor]) -> Tensors:
    return {f"step {number}": value for number, value in enumerate(values, start=1)}


class Recorder:
    """A recorder of the samples and losses of each step, and of the gradients of the first step, in one process.

    Args:
        session: the run in this process.
        state: the state of the run before the first step.
    """

    def __init__(self, session: Session, state: State):
        self._collectives: Collectives = session.collectives
        self._shard, self._devices = session.plan.data_shard, session.devices
        self._size = session.plan.micro_size
        self._samples: list[list[str]] = []
        self._losses: list[list[torch.Tensor]] = []
        self._gradients: Tensors = {}
        self._random_state = random_state(self._devices)
        self.computes_below_float64 = False
        self._model = state.model
        state.optimizer.register_step_pre_hook(self._keep_first_gradients)
        self._watch(session.workload, isinstance(session.precision, Double))

    def begin_step(self) -> None:
        """Begin the next step: everything recorded from now on belongs to this step."""
        self._samples.append([])
        self._losses.append([])

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the micro-batches in `batches`. The samples of a micro-batch are recorded before it is yielded."""
        for batch in batches:
            self._samples[-1] += sample_hashes(batch, self._size)
            yield batch

    def _watch(self, workload: Workload, in_float64: bool) -> None:
        """Replace methods of `workload`, so that the losses of a supervised workload are recorded.

        If `in_float64` is True, also record whether the backward pass of a loss has gradients of fewer than 64 bits.
        Such gradients are not detected in modes that call `loss_of` instead of `loss`, such as a pipeline.
        """
        if isinstance(workload, SupervisedWorkload):
            loss_of = workload.loss_of

            def recording_loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, BatchSums]:
                self._losses[-1] += _loss_of_each(workload, outputs, targets)
                return loss_of(outputs, targets)

            workload.loss_of = recording_loss_of
        if in_float64:
            loss = workload.loss

            def watching_loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, BatchSums]:
                value, sums = loss(model, batch)
                on_gradient(value, self._note_format)
                return value, sums

            workload.loss = watching_loss

    def _note_format(self, gradient: torch.Tensor) -> None:
        self.computes_below_float64 |= gradient.is_floating_point() and gradient.dtype != torch.float64

    def _keep_first_gradients(self, *_: Any) -> None:
        """Store a copy of the gradients if this is the first step.

        The gradients of later steps are not compared, because the weights of the two runs may differ by then.
        """
        if len(self._samples) == 1:
            named = self._model.named_parameters()
            self._gradients = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}

    def drew_random_numbers(self) -> bool:
        """Return whether the steps of this process used torch's global random number generators."""
        now = random_state(self._devices)
        return any(not torch.equal(before, now[name]) for name, before in self._random_state.items())

    def all_gradients(self) -> Tensors:
        """Return the gradients of the first step by name, gathered on rank 0. Every rank must call this."""
        full = {name: full_tensor(gradient).cpu() for name, gradient in self._gradients.items()}
        return self._collectives.gather_to_rank0(full)

    def all_losses(self) -> Tensors:
        """Return the losses of all samples of each step, in ascending order. Every rank must call this.

        The losses are sorted because a mode may process the samples of a batch in any order. If several ranks with the
        same shard of the data record losses, they record the same losses, which are returned only once.

        Returns:
            A dict with the keys `step 1`, `step 2`, …, whose values are float64 tensors [batch_size]. The dict is empty
            if no losses were recorded.
        """
        own = [torch.stack(losses).tolist() for losses in self._losses if losses]
        shards: dict[Any, list[list[float]]] = {}
        for shard, losses in self._collectives.all_gather((self._shard, own)):
            if losses:
                shards.setdefault(shard, losses)
        steps = [sorted(chain.from_iterable(parts)) for parts in zip(*shards.values(), strict=False)]
        return _by_step([torch.tensor(losses, dtype=torch.float64) for losses in steps])

    def all_samples(self) -> list[list[str]]:
        """Return, for each step, the sorted hashes of the samples of all ranks. Every rank must call this.

        Ranks with the same shard of the data should see the same samples. The hashes of ranks that have the same shard
        and see the same samples in all steps are returned only once.
        """
        gathered = self._collectives.all_gather((self._shard, self._samples))
        shards: dict[Any, list[list[list[str]]]] = {}
        for shard, samples in gathered:
            if samples not in shards.setdefault(shard, []):
                shards[shard].append(samples)
        different = [samples for of_shard in shards.values() for samples in of_shard]
        return [sorted(chain.from_iterable(parts)) for parts in zip(*different, strict=True)]


def _loss_of_each(workload: SupervisedWorkload, outputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss of each sample as a float64 scalar on the CPU, without changing the random state."""
    with torch.no_grad(), torch.random.fork_rng([outputs.device] if outputs.is_cuda else []):
        pairs = zip(outputs.detach().split(1), targets.split(1), strict=True)
        return [workload.criterion(output, target).cpu().double() for output, target in pairs]


def on_gradient(loss: torch.Tensor, note: Callable[[torch.Tensor], None]) -> None:
    """Make the backward pass of `loss` call `note` with the gradient of each tensor in the graph of `loss`."""

    def note_all(gradients: tuple[torch.Tensor, ...]) -> None:
        for gradient in gradients:
            if gradient is not None:
                note(gradient)

    nodes, known = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in known:
            known.add(node)
            node.register_prehook(note_all)
            nodes += [parent for parent, _ in node.next_functions]


def evaluated(state: State) -> Tensors:
    """Evaluate the network, in the parallel mode of the run, on the first batch that a single device would train on.

    Every rank must call this. Afterwards, the workload can no longer be evaluated on its own data, because its methods
    `evaluate` and `summarize` are replaced.

    Returns:
        A dict with the key `outputs`: the outputs of the network, [batch_size, …], on the CPU. The dict is empty if the
        workload is not supervised or its batches have no inputs.
    """
    run, session, model = state.run, state.session, state.model
    workload, device = run.workload, session.device
    if not isinstance(workload, SupervisedWorkload):
        return {}
    first = next(workload.batches(model, Plan(run.batch_size, seed=session.plan.seed), 0, device))
    inputs = getattr(first, "inputs", None)  # a workload may have batches, and a loss, of its own
    if not isinstance(inputs, torch.Tensor):
        return {}

    def evaluate(
        infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        start, stop = shard_bounds(len(inputs), shard)
        own = infer(inputs[start:stop])
        outputs = own.new_zeros(len(inputs), *own.shape[1:])
        outputs[start:stop] = own
        return {"outputs": outputs}

    workload.evaluate, workload.summarize = evaluate, lambda sums: {}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    _, sums = run.parallel.evaluate(model)
    model.train()
    for name, buffer in model.named_buffers():  # `evaluate` may average them; `full_state` must do so by itself
        buffer.copy_(buffers[name])
    return {name: tensor.cpu() for name, tensor in sums.items()}
