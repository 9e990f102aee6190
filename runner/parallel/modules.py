"""The modules of a run, its network and its loss, and their state besides the weights: buffers, and the mode."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check
from runner.parallel import full_state
from runner.parallel.attributes import (
    attributes_kept,
    is_of_user,
    marks,
    other_marks,
    plain_values,
    saved_names,
    set_values,
    unsaved_buffers,
    without_value,
)
from runner.parallel.buffers import average, buffers_kept, named_buffers
from runner.parallel.collectives import bytes_of
from runner.parallel.session import Session
from runner.storage.value_checks import UnexpectedContentError
from runner.system.trees import is_double

log = logging.getLogger(__name__)


class Modules:
    """The model, as the mode has placed it, and the loss of the workload if it is a module."""

    def __init__(self, model: torch.nn.Module, session: Session):
        self._model, self._session = model, session
        plan = session.plan
        numbers = [plan.data_shard[1], plan.step_shard[1], plan.num_members]
        self.replicas = numbers if max(numbers) > 1 else []
        """How many ranks have other samples, other steps, and other members; empty if none have."""
        values = {name: each for name, each in model.named_buffers() if not hasattr(each, "fake_mode")}  # of a plan
        names = full_state.not_finite(values), without_value(model)
        of_ranks = session.collectives.all_gather(names) if plan.splits_network else [names]
        # A process of a pipeline has no buffers of other stages.
        missing = set[str].intersection(*({*names} for _, names in of_ranks))
        self.not_finite = {name for names, _ in of_ranks for name in names} | missing
        """The buffers of the model that are not finite from the beginning, such as masks, or have no value then."""
        self.begins_without_values = any(is_of_user(model.get_submodule(name.rpartition(".")[0])) for name in missing)
        """Whether a module that is not torch's has buffers that are None, which perhaps only training gives values."""
        self._beginning = self._loaded = self._named(marks)
        self._names = saved_names(model)
        self._others, self._restored = self._named(other_marks), dict[str, Any]()

    @property
    def each(self) -> list[torch.nn.Module]:
        """The modules; the loss is on the device and in the format of the model."""
        if (loss := self._session.workload.loss_module()) is None:
            return [self._model]
        dtype = torch.float64 if is_double(self._model) else torch.float32
        return [self._model, loss.to(self._session.device, dtype)]

    def check_names(self, is_late: bool = False) -> None:
        """Refuse parameters and buffers that training makes or removes, except a buffer that begins as None.

        If `is_late`, when weights may be lost, that is only said.
        """
        now, before = saved_names(self._model), self._names
        made, removed = now.keys() - before.keys(), [n for n in before if before[n] and not now.get(n)]
        names = ", ".join(sorted({*made, *removed})[:3])
        why = f"training makes or removes {names}, which no optimizer would train, or no checkpoint restore"
        remedy = "make it in __init__, by register_buffer(name, None) if it has no value yet, or use a lazy module"
        if names and is_late:
            log.warning("model: %s: no run can be resumed or loaded from this checkpoint; %s", why, remedy)
        check(not names or is_late, "model", type(self._model).__name__, why, remedy)

    def train(self) -> None:
        """Put the modules into training mode."""
        for module in self.each:
            module.train()

    def _named(self, values: Callable[[torch.nn.Module], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the `values` of all modules by name, after the number of the module."""
        return {f"{number}.{name}": v for number, each in enumerate(self.each) for name, v in values(each).items()}

    def plain_values(self) -> dict[str, Any]:
        """Return the numbers, texts and None in attributes of the modules, by name."""
        return self._named(plain_values)

    def _changed(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values of attributes, and the buffers that are not saved, that are no longer as `before`."""
        now, missing = self._named(marks), object()
        names = [name for name, mark in now.items() if before.get(name, missing) != mark]
        values = self._named(lambda each: plain_values(each) | unsaved_buffers(each))
        return full_state.copied({name: values[name] for name in names})

    def attributes(self) -> dict[str, Any]:
        """Return what training has changed that no state dict has: plain values of attributes, and unsaved buffers.

        Those of rank 0; of a pipeline, those of all ranks, on rank 0. Called on every rank, in `synchronized`.
        """
        if not self._session.plan.splits_network:
            return self._changed(self._beginning)
        # What this process has loaded for the stages of others does not change here.
        return self._restored | self._session.collectives.gather_to_rank0(self._changed(self._loaded))

    def say_unsaved(self, saved: Container[str]) -> None:
        """Say which attributes have changed since the beginning that no checkpoint has, or that differ between ranks.

        The code of the user has `saved` those with these names (see `CodeState`). Called on every rank.
        """
        now = self._named(other_marks)
        changed = [name for name, mark in self._others.items() if now.get(name, mark) != mark]
        roots = "model", "loss"
        lost = [name for name in changed if f"{roots[int(name[0])]}{name[1:]}" not in saved]
        if names := sorted(map(self._in_words, lost)):
            text = "model: %s changes in training, and no checkpoint has it: a run that is resumed or loaded begins "
            text += "with its first value; make it a buffer or a number, or return it in get_extra_state()"
            log.warning(text, ", ".join(names))
        if self.replicas and not self._session.plan.num_members:
            values = self.plain_values()
            of_ranks = self._session.collectives.all_gather(values)
            names = sorted(
                self._in_words(name) for name in values if any(of.get(name) != values[name] for of in of_ranks)
            )
            if names and self._session.rank == 0:
                text = "model: %s differs between processes: resumed by another number, the run has that of rank 0"
                log.warning(text, ", ".join(names))

    def _in_words(self, name: str) -> str:
        number, _, rest = name.partition(".")
        return f"{type(self.each[int(number)]).__name__}.{rest}"

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """A context in which all ranks have the same buffers, for a checkpoint; then, each has its own again."""
        plan, collectives = self._session.plan, self._session.collectives
        with buffers_kept(modules := self.each):
            if plan.data_shard[1] > 1:
                average(named_buffers(modules), collectives)
            elif plan.splits_network:  # the process of the last stage computes the loss
                of_loss = {f"1{name[1:]}": each.cpu() for name, each in named_buffers(modules[1:]).items()}
                is_last = collectives.rank == collectives.world_size - 1
                self._set_values(collectives.all_gather(of_loss if is_last else {})[-1], {})
            else:
                collectives.barrier()  # all updates of shared memory are written
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which all ranks have the same buffers in evaluation mode; then, they train as before.

        Also the values of attributes, which the network may change, are then those of before.
        """
        with ExitStack() as kept:
            kept.callback(self.train)
            for module in self.each:
                module.eval()  # which may merge weights and remember it, as layers of LoRA do: train() undoes that
            kept.enter_context(attributes_kept(self.each))
            kept.enter_context(self.synchronized())
            yield

    def of_rank(self) -> dict[str, Any]:
        """Return copies of buffers, extra state and changed plain values by name, if each rank has its own."""
        if not self.replicas:
            return {}
        extra = {name: copy.deepcopy(module.get_extra_state()) for name, module in self._with_extra_state().items()}
        changed = {name: each for name, each in self._changed(self._beginning).items() if not torch.is_tensor(each)}
        return extra | changed | {name: each.clone() for name, each in named_buffers(self.each).items()}

    def only_of_rank(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return `own`, on the CPU, without buffers of the model that do not differ once ranks are synchronized."""
        same = named_buffers([self._model])
        equal = [name for name in same if name in own and bytes_of(own[name]).equal(bytes_of(same[name]))]
        rest = {name: each for name, each in own.items() if name not in equal}
        return {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in rest.items()}

    def _with_extra_state(self) -> dict[str, torch.nn.Module]:
        named = ((f"{number}.{name}", m) for number, each in enumerate(self.each) for name, m in each.named_modules())
        default = torch.nn.Module.get_extra_state
        return {f"{name}._extra_state": each for name, each in named if type(each).get_extra_state is not default}

    def loss_state(self) -> list[dict[str, Any]]:
        """Return a copy of the state of the loss; an empty list if it is no module."""
        return [full_state.copied(module.state_dict()) for module in self.each[1:]]

    def load(
        self, weights: Mapping[str, Any], shared: Mapping[str, Any], of_rank: dict[str, Any], replicas: list[int]
    ) -> None:
        """Load what is beside `weights` in a checkpoint: `loss_state`, `attributes`, and what `only_of_rank` returned.

        The latter is loaded if `replicas` were as many as now.

        Raises:
            ConfigError: if the loss is another one.
            UnexpectedContentError: if the buffers of the rank are not of these modules.
        """
        self._load_loss(shared.get("loss", []))
        self._restored = full_state.copied(shared.get("attributes", {}))
        has_own = bool(self.replicas) and replicas == self.replicas  # then, plain values are those of the rank alone
        self._set_values({n: v for n, v in self._restored.items() if not has_own or torch.is_tensor(v)}, weights)
        if has_own:
            extra = {name: each for name, each in self._with_extra_state().items() if name in of_rank}
            for name, module in extra.items():
                module.set_extra_state(of_rank[name])
            self._set_values({name: each for name, each in of_rank.items() if name not in extra}, weights)
        self._loaded = self._named(marks)

    def _set_values(self, values: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        for number, each in enumerate(self.each):
            set_values(each, {n[2:]: v for n, v in values.items() if n.startswith(f"{number}.")}, weights)

    def _load_loss(self, saved: list[dict[str, Any]]) -> None:
        loss = self.each[1:]
        has_state = any(module.state_dict() for module in loss)
        if has_state != any(saved):
            found = "no state of the loss, which begins anew" if has_state else "a state of the loss, which has none"
            log.info("the checkpoint has %s", found)
            return
        try:
            for module, tensors in zip(loss, saved, strict=has_state):
                full_state.load_module(module, tensors, "the loss")
        except UnexpectedContentError as error:
            name, why = user_code.given().names().get("loss", ABSENT), f"it is not that of the checkpoint: {error}"
            raise ConfigError("loss", name, why, "give the loss of the run, or start a new run") from None
