"""The first step of a run on a single device, with which the proof at the start compares that of its mode.

It is that of copies of the components, with a learning rate of zero, so that the run begins as it does without a proof.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from runner import code_state
from runner.batching import Accumulation, Plan
from runner.config.errors import described
from runner.failures import torch_refusals
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives
from runner.parallel.session import Session
from runner.precision import Double, Precision
from runner.run import Run
from runner.schedule import Schedule
from runner.seeds import derive, seed_all
from runner.system import torch_errors
from runner.system.memory import too_little_memory_raises
from runner.tracking.metrics import DivergedError
from runner.verification.carried_state import carried_state, clipped_gradient
from runner.verification.steps import Steps, record
from runner.verification.verdict import FLOAT32_ROUNDING, Difference, largest_difference
from runner.workloads.base import Workload

KINDS = ("loss", "gradients", "buffers", "evaluation")
"""The kinds of tensors that are compared (see `Steps`)."""

SWITCHES: tuple[Callable[[torch.nn.Module], object], ...] = (
    lambda model: None,
    lambda model: [module.eval() for module in model.modules() if isinstance(module, _DropoutNd)],
    lambda model: model.eval(),
)
"""What is done to a network until it draws no random numbers, which processes and micro-batches draw differently."""


@dataclass
class _Still(Schedule):
    """A learning rate of zero, with which rounding in the gradients changes no weight before the evaluation."""

    def factor(self, update: int, num_updates: int) -> float:
        return 0.0


def copy_of(run: Run, precision: Precision, parallel: Parallel, **options: object) -> Run:
    """Return a run that trains with copies of the components of `run`, in another precision and mode."""
    workload = _copied(run.workload)
    parts = {
        "precision": copy.deepcopy(precision),
        "parallel": parallel,
        "workload": workload,
        "schedule": _Still(),
    }
    copied = replace(run, **parts, resume="never", **options)  # pyright: ignore[reportArgumentType]
    copied.config = run.config
    return copied


def _copied(workload: Workload) -> Workload:
    """Return a copy that shares the data, but no object that can be called, such as a loss with statistics."""
    copied = copy.copy(workload)
    for name, value in vars(workload).items():
        if callable(value):  # of a function, `deepcopy` returns the function
            setattr(copied, name, copy.deepcopy(value))
    return copied


def first_step(run: Run, session: Session, scratch: Path, change: Callable[[torch.nn.Module], object]) -> Steps:
    """Train the first step of `run`, whose network `change` changes before; called on every rank of `session`."""
    try:
        with torch_refusals(run), code_state.before(run).unchanged():
            steps = record(run, session, scratch, change)
    except DivergedError as error:
        return Steps(diverged=str(error))
    weights = steps.tensors["weights"]  # all the others are as they were
    steps.tensors["weights"] = {name: each for name, each in weights.items() if name in steps.replaced}
    return steps


class SingleDevice:
    """The first step of a run on a single device, by precision: rank 0 computes it, while the others wait.

    Attributes:
        fine: the precision of the run, or float32 if that is finer.
        switch: the index of what is done to the network (see `SWITCHES`).
        parts: how many parts of the batch are taken one after another: one, unless batch normalization sees parts.
    """

    def __init__(self, run: Run, session: Session, scratch: Path):
        self._run, self._session, self._scratch = run, session, scratch
        self._num_parts = session.plan.num_parts
        self.fine = run.precision if run.precision.tolerance <= Precision.tolerance else Precision()
        self.switch, self.parts, self._batch_norms = 0, 1, set[str]()
        self._steps: dict[tuple[type[Precision], int], Steps] = {}

    def choose(self) -> tuple[int, str, str, str]:
        """Choose `switch` and `parts`.

        Returns:
            `switch`, why nothing can be compared, why no switch ends random numbers, and a mistake of the run.
        """
        if self._num_parts > 1 and (name := self._of_copy(clipped_gradient)):
            why = f"the gradient of {name} is no multiple of that of the loss, as of a hook that limits it"
            return 0, "", "", f"{why}, and in parts of a batch, losses have another size"
        try:
            draws = ""
            for self.switch in range(len(SWITCHES)):
                self._find_batch_norm()
                steps = self.steps(self.fine)
                if steps.diverged:
                    return self.switch, f"{steps.diverged} on a single device, too", "", ""
                if not steps.draws:
                    break
                self._steps.clear()
            else:
                draws = "the network draws random numbers in evaluations, too"
        except Exception as error:
            if torch_errors.is_out_of_memory(error):
                return self.switch, "a single device has no memory for it", "", ""
            if not self.switch:
                raise
            draws = f"the network draws random numbers, and in evaluation mode it fails: {described(error)}"
        if draws:
            self.switch = 0
            self._steps.clear()
            self._find_batch_norm()
            if self._is_same_with_other_random_numbers():
                draws = ""
        return self.switch, "", draws, self._mistake(self.steps(self.fine))

    def _mistake(self, steps: Steps) -> str:
        """Return what the code of the run does in `steps` that no division of a batch can do; else, an empty text."""
        plan, is_compiled = self._session.plan, bool(self._run.compile)
        is_in_passes = plan.accumulation * plan.chunks > 1
        are_lost = steps.written * (self._num_parts > 1 or is_compiled)
        if names := are_lost + steps.replaced * (is_in_passes or is_compiled):
            why = "something other than the optimizer, such as the forward pass, writes weights"
            return f"{why} ({names[0]}): each part of a batch would leave others"
        if is_in_passes and (name := self.carried()):
            why = f"each forward pass changes {name}, with which the next one computes"
            return f"{why}, and a single device has one pass a step, of the whole batch"
        return ""

    def _find_batch_norm(self) -> None:
        """Find the layers whose results depend on the batch; then, a single device takes the batch in parts, too."""
        model = self._run.workload.build_model()
        SWITCHES[self.switch](model)
        synchronized = getattr(self._run.parallel, "sync_batch_norm", False)
        layers = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm) and each.training}
        is_of_ranges = not self._session.devices[1:] and not (synchronized and self._session.plan.accumulation > 1)
        if layers and not is_of_ranges:  # as replicas in one process, or synchronized micro-batches
            self.switch, layers = len(SWITCHES) - 1, {}
        self.parts = self._num_parts if layers and not synchronized else 1
        self._batch_norms = {f"{name}.{key}" for name, each in layers.items() for key, _ in each.named_buffers()}

    def steps(self, precision: Precision, parts: int | None = None) -> Steps:
        """Return the first step in `precision`, with the batch in `parts`; it is computed once."""
        parts = parts or self.parts
        key = type(precision), parts
        if key not in self._steps:
            self._steps[key] = self._trained(precision, parts, SWITCHES[self.switch])
        return self._steps[key]

    def _trained(self, precision: Precision, parts: int, change: Callable[[torch.nn.Module], object]) -> Steps:
        run = copy_of(self._run, precision, Parallel(), accumulation=Accumulation(parts), compile=False)
        plan = Plan(run.batch_size, parts, seed=self._session.plan.seed)
        process = Collectives(self._session.devices[:1])
        session = Session(process, plan, run.workload, run.precision, num_steps=1)
        with too_little_memory_raises(session.device):
            return first_step(replace(run, channels_last=False), session, self._scratch, change)

    def _is_same_with_other_random_numbers(self) -> bool:
        """Return whether the random numbers that are drawn change nothing, as of a choice among one size."""

        def change(model: torch.nn.Module) -> None:
            SWITCHES[self.switch](model)
            seed_all(derive(self._session.plan.seed, "proof"))

        steps, others = self.steps(self.fine), self._trained(self.fine, self.parts, change)
        return not others.diverged and all(self.largest(others, steps, kind).size <= FLOAT32_ROUNDING for kind in KINDS)

    def has_float64(self) -> bool:
        try:
            Double().check_device(self._session.device)
            return not self.steps(Double()).diverged
        except Exception:  # code that computes with values in float32, for example
            return False

    def largest(self, ours: Steps, theirs: Steps, kind: str) -> Difference:
        """Return the largest difference of a kind of tensors, of those that can be compared."""
        tensors, others = ours.tensors[kind], theirs.tensors[kind]
        if kind == "evaluation" and (self.parts > 1 or not (tensors and others)):  # it uses the running statistics
            return Difference(0.0, "not compared")
        if self.parts > 1:  # statistics of the whole batch are not those of its parts
            tensors, others = (
                {n: t for n, t in each.items() if n not in self._batch_norms} for each in (tensors, others)
            )
        return largest_difference(tensors, others)

    def carried(self) -> str:
        """Return the name of what a forward pass in training leaves to the next one (see `carried_state`)."""
        return self._of_copy(carried_state)

    def _of_copy(self, find: Callable[[Run, Session, int], str]) -> str:
        with code_state.before(self._run).unchanged():
            return find(copy_of(self._run, self.fine, Parallel()), self._session, self._num_parts)
