"""The workload of a user's training step, or of several phases of one, for what is not outputs and then a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch

from runner.config import functions, user_code
from runner.config.errors import ABSENT, ConfigError, check, described, did_you_mean
from runner.config.name_patterns import matching, names_to_match
from runner.data.base import Collated, DataError, Samples
from runner.system.torch_errors import is_lost_peer, is_out_of_memory
from runner.system.trees import Tree, doubled, is_double, num_rows
from runner.tracking.metrics import BatchSums, MetricSums
from runner.workloads.losses import Losses, LossForm, added, losses_of, means_of
from runner.workloads.phases import Phase
from runner.workloads.user_base import UserCodeWorkload

log = logging.getLogger(__name__)

_ARGUMENTS = ("model", "batch")
"""Those of a step."""


class UserPhase(NamedTuple):
    """A phase as a user gives it: `step(model, batch)` trains what the `parameters`, patterns, match."""

    step: Callable[[torch.nn.Module, Tree], Any]
    every: int = 1
    parameters: Sequence[str] = ()


@dataclass
class UserSteps(UserCodeWorkload):
    """`training_step(model, batch)`, which returns a loss in a form of `losses`; or `phases`, a dict of such steps.

    In each phase, the parameters that its name matches are trained. Evaluations call `evaluation_step(model, batch)`;
    by default, the same steps. A batch is what `collate` returns, or the samples stacked. For options, see
    `conf/workload/_steps.yaml`.
    """

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("eval_batch_size", "best_metric", "best_goal")
    code_parts: ClassVar[tuple[str, ...]] = user_code.STEPS
    has_steps: ClassVar[bool] = True

    def use(self, train: Samples, held_out: Samples) -> None:
        self._phases = _given_phases()
        self._evaluation = user_code.function_of("evaluation_step", _ARGUMENTS, "…")
        self._forms: dict[str, LossForm] = {}
        super().use(train, held_out)

    def phases(self, model: torch.nn.Module) -> list[Phase]:
        if "" in self._phases:
            return [Phase()]
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        names = {name: each for name, each in names_to_match(model).items() if name in trained}
        found, owner = list[Phase](), dict[str, str]()
        for name, phase in self._phases.items():
            patterns = phase.parameters or [name]
            matched = {each for one in patterns for each in matching("phases", one, names, "trained parameter")}
            for each in sorted(matched):
                other = owner.setdefault(each, name)
                why = f"{each} is trained in {other}, too, and a parameter belongs to one phase"
                check(other == name, f"phases.{name}", ", ".join(patterns), why, "let no two phases train it")
            found.append(Phase(name, phase.every, frozenset(matched)))
        if left := [name for name in names if name not in owner]:
            log.warning("no phase trains %s%s", left[0], f" and {len(left) - 1} others" * bool(left[1:]))
        return found

    @property
    def loss_form(self) -> LossForm | None:
        return self._forms.get(self.phase)

    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, BatchSums]:
        step = self._phases[self.phase].step
        key = f"phases.{self.phase}" if self.phase else "training_step"
        is_first = self.phase not in self._forms
        before = _gradients(model) if is_first else []
        returned = step(model, _as_trained(model, _given(batch)))
        if is_first:
            why = f"it calls backward(){functions.place(step)}, or, with parallel=fsdp, torch.autograd.grad"
            remedy = "leave backward() out: the run calls it with the loss that is returned; or parallel=ddp"
            check(_gradients(model) == before, key, ABSENT, why, remedy)
        found = self._losses(key, step, returned, batch)
        form = found.checked_form(self._forms.get(self.phase), step)
        if is_first:
            self._forms = {**self._forms, self.phase: form}  # a copy of the workload has forms of its own
        return found.per_sample, found.sums

    def outputs(self, model: torch.nn.Module, inputs: Any) -> dict[str, Any]:
        """Return what the evaluation step returns, under an empty name, or the steps of all phases by their names."""
        batch = _as_trained(model, inputs)
        return {name: step(model, batch) for name, step in self._evaluation_steps().items()}

    def _evaluation_steps(self) -> dict[str, Callable[..., Any]]:
        if self._evaluation is not None:
            return {"": self._evaluation}
        return {name: phase.step for name, phase in self._phases.items()}

    def _losses(self, key: str, step: Callable[..., Any], returned: Any, batch: Any) -> Losses:
        count = batch.num_samples if isinstance(batch, Collated) else num_rows(batch)
        try:
            return losses_of(returned, count, step, self._batch_size)
        except ConfigError as error:
            raise ConfigError(key, error.got, error.why, error.remedy) from None

    @contextmanager
    def few_samples(self, count: int, device: torch.device) -> Iterator[None]:
        held_out = self.held_out
        batch = next(iter(held_out.in_order(count, (0, 1), device)))
        one: Any = SimpleNamespace(in_order=lambda *_: iter([batch]))  # for every shard
        self.held_out = one
        try:
            yield
        except (ConfigError, DataError):
            raise
        except Exception as error:
            if is_lost_peer(error) or is_out_of_memory(error):
                raise
            how = "it is called" if self._evaluation else "without it, the training steps are called"
            why = f"{how} in evaluation mode without gradients, which raises {described(error)}"
            raise ConfigError("evaluation_step", ABSENT, why, "def evaluation_step(model, batch): …") from error
        finally:
            self.held_out = held_out

    def evaluate(self, infer: Callable[[Tree], Any], shard: tuple[int, int], device: torch.device) -> MetricSums:
        sums: dict[str, torch.Tensor] = {}
        steps = self._evaluation_steps()
        for batch in self.held_out.in_order(self.eval_batch_size, shard, device):
            values: dict[str, torch.Tensor] = {}
            for name, returned in infer(_given(batch)).items():
                key = "evaluation_step" if self._evaluation else f"phases.{name}" if name else "training_step"
                found = self._losses(key, steps[name], returned, batch).by_name()
                values |= dict(zip(Phase(name).prefixed([*found]), found.values(), strict=True))
            sums = added(sums, values)
        return {"losses": [sums]}  # in a list, as a process without samples does not know the names

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        means = means_of(sums["losses"])
        of_phases = [means[name] for name in (f"{phase}/loss" for phase in self._phases) if name in means]
        means = {"loss": sum(of_phases)} | means
        self.check_best(means)
        return means

    def eval_metrics(self) -> dict[str, str]:
        return {"loss": "min"} | dict([self.selection])

    def describe(self) -> dict[str, str]:
        several = "" not in self._phases
        text = f"those of the phases {', '.join(self._phases)}" if several else "that of training_step"
        return {
            "data": self.summary(),
            "loss": f"{text}; evaluations call evaluation_step" if self._evaluation else text,
        }

    def input_shape(self) -> None:
        return None  # a step may call the network with anything


def _given(batch: Any) -> Any:
    """Return the samples of a batch in the form in which the data gives them."""
    return batch.batch if isinstance(batch, Collated) else tuple(batch)


def _as_trained(model: torch.nn.Module, given: Any) -> Any:
    """Return samples in float64 if the network is, as with precision=64."""
    return doubled(given) if is_double(model) else given


def _gradients(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Return what tells whether a backward pass has changed gradients."""
    return [(id(p.grad), 0 if p.grad is None else p.grad._version) for p in model.parameters()]


def _given_phases() -> dict[str, UserPhase]:
    """Return the phases of the user's code by name; a training step is the only one, and has none."""
    step, given = user_code.find("training_step"), user_code.find("phases")
    why, remedy = "the code has neither training_step nor phases", "def training_step(model, batch): …"
    check(step is not None or given is not None, "training_step", ABSENT, why, remedy)
    check(step is None or given is None, "phases", ABSENT, "there is a training_step, too", "leave one of the two out")
    if step is not None:
        functions.check_function("training_step", step, _ARGUMENTS)
        return {"": UserPhase(step)}
    remedy = 'phases = {"critic": critic_step, "generator": {"step": generator_step, "every": 5}}'
    given = given if isinstance(given, Mapping) else {}
    is_dict = bool(given) and all(isinstance(name, str) and name for name in given)
    check(is_dict, "phases", ABSENT, "it is no dict from the names of phases to their steps", remedy)
    found = {name: _phase(name, value, remedy) for name, value in given.items()}
    least = min(phase.every for phase in found.values())
    check(least == 1, "phases", ABSENT, "no phase trains in the first step", "leave `every` out in one of them")
    return found


def _phase(name: str, given: Any, remedy: str) -> UserPhase:
    options = given if isinstance(given, Mapping) else {"step": given}
    key = f"phases.{name}"
    for option in options:
        known = did_you_mean(option, UserPhase._fields)
        check(option in UserPhase._fields, f"{key}.{option}", ABSENT, "a phase has no such option;", known)
    check("step" in options, key, given, "it has no step", remedy)
    phase = UserPhase(**options)
    functions.check_function(key, phase.step, _ARGUMENTS)
    is_number = type(phase.every) is int and phase.every >= 1
    check(is_number, f"{key}.every", phase.every, "it is no positive whole number", "every: 5")
    found = options.get("parameters", ())
    patterns = [found] if isinstance(found, str) else found
    is_list = isinstance(patterns, list | tuple) and all(isinstance(each, str) for each in patterns)
    check(is_list, f"{key}.parameters", found, "it is no pattern of names, nor a list of them", '["encoder", "*.bias"]')
    return phase._replace(parameters=patterns)
