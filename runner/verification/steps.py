"""Trains the first steps of a run for `runner verify`, and records their samples and tensors.

Workloads and parallel modes contain no code for this: samples are recorded when the workload yields them.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from runner.batching import Plan
from runner.config import user_code
from runner.config.errors import ConfigError, check
from runner.config.schema import component_fields
from runner.data.base import copied, shard_bounds
from runner.failures import torch_refusals
from runner.models.layers import normalizes_batches
from runner.parallel.collectives import Collectives, bytes_of
from runner.parallel.full_state import full_tensor, local_part, without_state
from runner.parallel.session import Session
from runner.precision import Double
from runner.result import Result
from runner.run import Run, build_run
from runner.seeds import drawn_since, random_states
from runner.state import State
from runner.system.trees import leaves_of, rows_of, tensors_of
from runner.tracking.log_file import quiet
from runner.tracking.metrics import DivergedError, MetricSums
from runner.training import prepare, step_function
from runner.workloads.supervised import SupervisedWorkload

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
        samples: for each step, the sorted hashes of the samples of all processes; an empty list if there are none.
        tensors: the tensors by kind (see `KINDS` in `verdict`), and then by name; empty if the run diverged.
        expected: why the results are expected to differ from those of a single device; empty if they are not.
        diverged: which value was not finite; empty if all were.
        draws: whether the steps drew random numbers, as dropout does.
        written: names of trained weights that something other than the optimizer has changed in place.
        replaced: names of other weights that it has changed, as by `weight.data = …` or of an averaged copy.
    """

    samples: list[list[str]] = field(default_factory=list)
    tensors: dict[str, Tensors] = field(default_factory=dict)
    expected: str = ""
    diverged: str = ""
    draws: bool = False
    written: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


def first_steps(runs: Sequence[Run]) -> list[Steps]:
    """Train the first steps of all runs in the same processes, and return their records in the order of `runs`.

    The runs must differ only in their precision. If the device or the network does not support float64, runs in float64
    beside others are left out.

    Raises:
        ConfigError: if a run is refused, if a single device cannot compute the same results, or if all runs are in
            float64 and the device does not support it.
        RankError: if a process fails.
    """
    launcher = runs[0].parallel.launcher(runs[0].device)
    with tempfile.TemporaryDirectory(prefix="runner-verify-") as scratch, launcher.connect() as collectives:
        possible = [run for run in runs if _has_format(run, collectives.devices[0])] or runs
        session = possible[-1].prepare(collectives)  # the largest, in float64: a mode may allocate memory for its model
        check_comparable(possible[-1], session)
        rank_main = partial(record_runs, [run.config for run in possible], Path(scratch))
        launcher.launch(partial(rank_main, collectives), rank_main, session, Path(scratch))
        files = (Path(scratch, f"{number}.pt") for number in range(len(possible)))
        return [Steps(**torch.load(file, weights_only=True)) for file in files if file.exists()]


def _has_format(run: Run, device: torch.device) -> bool:
    try:
        run.precision.check_device(device)
    except ConfigError:
        return not isinstance(run.precision, Double)
    return True


def check_comparable(run: Run, session: Session) -> None:
    """Raise a `ConfigError` if a single device cannot compute the same results as `run`."""
    why, processes = run.parallel.difference, session.world_size
    check(not why or processes == 1, "parallel.processes", processes, why, "parallel.processes=1 can be compared")
    if "env" in component_fields(type(run.workload)) and session.plan.num_data_ranks > 1:
        why = "each process trains on transitions from its own environments"
        raise ConfigError("parallel", "several processes", why, "compare accumulation or precision instead")


def record_runs(configs: Sequence[dict[str, Any]], directory: Path, collectives: Collectives) -> Result:
    """Train the first steps of the run of each config. Rank 0 saves the record of config i in the file `i.pt`."""
    for number, config in enumerate(configs):
        run = build_run(config)
        session = run.prepare(collectives)
        with run.settings(session.device), quiet() if number else nullcontext():
            try:
                with torch_refusals(run):
                    steps = record(run, session, directory)
            except DivergedError as error:  # raised on all ranks, because the losses are reduced over all ranks
                steps = Steps(diverged=str(error))
            except ConfigError as error:
                if number == 0 or session.plan.splits_network:  # where other stages wait for this one
                    raise
                if session.rank == 0:  # float64 was not asked for
                    print(f"not compared in float64: {error.why}", file=sys.stderr, flush=True)
                continue
        if session.rank == 0:
            torch.save(vars(steps), directory / f"{number}.pt")
    return Result("done")


def record(
    run: Run, session: Session, directory: Path, change: Callable[[torch.nn.Module], object] = lambda model: None
) -> Steps:
    """Train the first steps of a run, and return their record. On rank 0, the record covers all ranks.

    `change` is called with the model, and with the loss if it is a module, once they are in training mode. The hooks
    that are given are called.
    """
    collectives, plan = session.collectives, session.plan
    state = prepare(run, session, directory)
    samples: list[list[str]] = []
    gradients: Tensors = {}
    written, replaced = set[str](), set[str]()
    before: list[dict[str, torch.Tensor]] = []
    weights: dict[str, Any] = {}

    def watched(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            samples[-1] += sample_hashes(batch, plan.micro_size)
            if not before:  # after a batch is read, which may draw, too
                before.append(random_states(session.devices))
            yield batch

    def keep_first_gradients(*_: Any) -> None:
        if len(samples) == 1:  # in later steps, the weights of the two runs may differ
            named = state.model.named_parameters()
            gradients.update({name: on_host(p.grad.detach()) for name, p in named if p.grad is not None})

    def before_update(*_: Any) -> None:
        state.modules.check_names()
        keep_first_gradients()
        for name, parameter in state.model.named_parameters():
            version, address, bits = weights[name]
            is_in_place = parameter._version != version
            if is_in_place and parameter.requires_grad:
                written.add(name)
            elif (
                is_in_place
                or address != local_part(parameter).data_ptr()
                or not bits.equal(bytes_of(local_part(parameter)).cpu())
            ):
                replaced.add(name)

    def after_update(*_: Any) -> None:
        for name, parameter in state.model.named_parameters():
            local = local_part(parameter)
            weights[name] = parameter._version, local.data_ptr(), on_host(bytes_of(local))

    state.optimizer.register_step_pre_hook(before_update)
    state.optimizer.register_step_post_hook(after_update)
    batches = watched(run.workload.batches(state.model, plan, 0, session.device))
    take_step = step_function(state)
    state.modules.train()
    for module in state.modules.each:
        change(module)
    for step in plan.steps(0, session.num_steps):
        samples.append([])
        after_update()
        take_step(state, batches, step, True)
        keep_first_gradients()  # of a compiled step, which has no hooks, but keeps gradients; others have none left
        state.hooks.after_step(state)
    call_other_hooks(state)
    losses: Tensors = {}
    for phase in state.phases:
        rows = state.step_metrics.peek()[phase.name]
        named = (
            f"{phase.name} {number}".strip() for number in range(phase.every, len(rows) * phase.every + 1, phase.every)
        )
        losses |= {f"step {name}": row[0, 0] / row[1, 0] for name, row in zip(named, rows, strict=True)}
    draws = bool(before and drawn_since(before[0], session.devices))

    tensors = {"loss": losses}
    of_ranks = collectives.gather_to_rank0({(name, session.rank): each for name, each in _kept(state).items()})
    tensors["buffers of ranks"] = {f"{name} of rank {rank}": each for (name, rank), each in of_ranks.items()}
    whole = {name: full_tensor(gradient).cpu() for name, gradient in gradients.items()}
    tensors["gradients"] = collectives.gather_to_rank0(whole)
    tensors["evaluation"] = evaluated(state)
    weights.clear()
    with state.modules.synchronized():
        full, _ = run.parallel.full_state(state.model, without_state(state.model))
    full = {name: each for name, each in full.items() if isinstance(each, torch.Tensor)}  # without extra states
    trained = set(chain(*collectives.all_gather([name for name, _ in state.model.named_parameters()])))
    tensors["weights"] = {name: tensor for name, tensor in full.items() if name in trained}
    tensors["buffers"] = {name: tensor for name, tensor in full.items() if name not in trained}

    num_passes = plan.accumulation * plan.chunks
    num_passes *= 1 if getattr(run.parallel, "sync_batch_norm", False) else plan.num_data_ranks
    normalizes = normalizes_batches(state.model)
    other_draws = num_passes > 1 or session.world_size > 1 or run.compile or session.devices[1:]
    reasons = {_BATCH_NORM: normalizes and num_passes > 1, _RANDOM_NUMBERS: draws and bool(other_draws)}
    expected = "\n".join(text for text, holds in reasons.items() if any(collectives.all_gather(holds)))

    of_shards: list[tuple[Any, list[list[str]]]] = []  # once for each shard, which several ranks may have
    for found in collectives.all_gather((plan.data_shard, samples)):
        if found not in of_shards:
            of_shards.append(found)
    of_steps = zip(*(steps for _, steps in of_shards), strict=True)
    in_order = [sorted(chain.from_iterable(parts)) for parts in of_steps]
    return Steps(in_order, tensors, expected, "", draws, sorted(written), sorted(replaced))


def _kept(state: State) -> Tensors:
    """Return what this process keeps for its next steps, on the CPU by name: buffers, attributes, variables of code.

    Of an integer, which may be of any size, these are the last digits.
    """
    others = dict(leaves_of({"attributes": state.modules.plain_values(), "code": state.code.changed()}))
    values = {name: value % 2**62 if isinstance(value, int) else value for name, value in others.items()}
    numbers = {name: value for name, value in values.items() if isinstance(value, torch.Tensor | int | float)}
    return {n: torch.as_tensor(v).detach().cpu() for n, v in (dict(state.model.named_buffers()) | numbers).items()}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, which takes no memory of an accelerator unless `tensor` is sharded."""
    return tensor.clone() if hasattr(tensor, "to_local") else tensor.to("cpu", copy=True)


def call_other_hooks(state: State) -> None:
    """Call the hooks of an evaluation, which is computed only if there is such a hook, and of a checkpoint."""
    if user_code.find("after_evaluation") is not None:
        with state.evaluating():
            metrics, _ = state.run.parallel.evaluate(state.model)
        metrics = state.session.collectives.from_rank_0(lambda: metrics)
        state.hooks.after_evaluation(state, {f"eval/{name}": value for name, value in metrics.items()})
    state.hooks.before_save(state)


def evaluated(state: State) -> Tensors:
    """Return the `outputs` of the network, [batch_size, …], in an evaluation of the first batch of a single device.

    Of outputs in a dict or another structure: the tensors with a row for each sample, such as `outputs.logits`.
    Called on every rank. The workload's methods `evaluate` and `summarize` stay replaced. The dict is empty if the
    workload is not supervised or its batches have no inputs.
    """
    model, workload, plan = state.model, state.session.workload, state.session.plan
    if not isinstance(workload, SupervisedWorkload):
        return {}
    first = next(workload.batches(model, Plan(plan.batch_size, seed=plan.seed), 0, state.session.device))
    inputs = getattr(first, "inputs", None)  # a workload may have batches, and a loss, of its own
    count = plan.batch_size
    found = tensors_of(inputs)
    if not found or any(not each.dim() or each.layout != torch.strided or len(each) != count for each in found):
        return {}

    def evaluate(infer: Callable[[torch.Tensor], Any], shard: tuple[int, int], device: torch.device) -> MetricSums:
        start, stop = shard_bounds(count, shard)
        sums: MetricSums = {}
        for name, of_shard in leaves_of(infer(copied(rows_of(inputs, start, stop))), "outputs"):
            if isinstance(of_shard, torch.Tensor) and of_shard.dim() and len(of_shard) == stop - start:
                of_shard = of_shard.byte() if of_shard.dtype == torch.bool else of_shard  # which can be added
                sums[name] = of_shard.new_zeros(count, *of_shard.shape[1:])
                sums[name][start:stop] = of_shard
        return sums

    workload.evaluate, workload.summarize = evaluate, lambda sums: {}
    with state.evaluating():
        _, sums = state.run.parallel.evaluate(model)
    return {name: tensor.cpu() for name, tensor in sums.items()}


def sample_hashes(batch: Any, count: int) -> list[str]:
    """Return a hash of each of the `count` samples in a batch: of all bits of the sample's row in every tensor.

    `batch` nests tensors in tuples, lists, mappings and objects. The list is empty if none has a row per sample, or the
    user's `collate` gives samples another form in another batch, as by padding.
    """
    if user_code.find("collate") is not None:
        return []
    hashes = [hashlib.sha256() for _ in range(count)]
    found = False
    for tensor in _tensors_of(batch):
        if tensor.dim() == 0 or len(tensor) != count or tensor.layout != torch.strided:
            continue
        found = True
        rows = tensor.detach().cpu().reshape(count, tensor.numel() // count).contiguous().view(torch.uint8).numpy()
        for digest, row in zip(hashes, rows, strict=True):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape[1:])} ".encode())
            digest.update(row.tobytes())
    return [digest.hexdigest() for digest in hashes] if found else []


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_iter(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from _tensors_of(vars(leaf))
