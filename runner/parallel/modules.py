"""The modules of a run, its network and its loss, and their state besides the weights: buffers, and the mode."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError
from runner.parallel import full_state
from runner.parallel.buffers import average, buffers_kept, named_buffers
from runner.parallel.collectives import bytes_of
from runner.parallel.session import Session
from runner.storage.value_checks import UnexpectedContentError, check_like

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
        names = full_state.not_finite(values)
        of_ranks = session.collectives.all_gather(names) if plan.splits_network else [names]
        self.not_finite = {*chain(*of_ranks)}
        """The buffers of the model that are not finite from the beginning, such as masks."""
        self._unsaved = self._of_no_state_dict()

    @property
    def each(self) -> list[torch.nn.Module]:
        """The modules; the loss is on the device and in the format of the model."""
        if (loss := self._session.workload.loss_module()) is None:
            return [self._model]
        is_double = any(each.dtype in (torch.float64, torch.complex128) for each in self._model.parameters())
        return [self._model, loss.to(self._session.device, torch.float64 if is_double else torch.float32)]

    def train(self) -> None:
        """Put the modules into training mode."""
        for module in self.each:
            module.train()

    def say_unsaved(self) -> None:
        """Say which numbers and buffers have changed since the beginning that no checkpoint has."""
        now = self._of_no_state_dict()
        if names := sorted(name for name, value in self._unsaved.items() if now.get(name) != value):
            text = "model: %s changes in training, and state_dict() does not have it: a run that is resumed or loaded "
            text += "begins with its first value; make it a buffer that is saved, or return it in get_extra_state()"
            log.warning(text, ", ".join(names))

    def _of_no_state_dict(self) -> dict[str, Any]:
        """Return the numbers of modules, and hashes of their buffers that are not saved, by name."""
        found: dict[str, Any] = {}
        for name, module in (named for each in self.each for named in each.named_modules(prefix=type(each).__name__)):
            if type(module).get_extra_state is torch.nn.Module.get_extra_state:
                numbers = {key: value for key, value in vars(module).items() if isinstance(value, int | float)}
                found |= {
                    f"{name}.{key}": value for key, value in numbers.items() if key[0] != "_" and key != "training"
                }
                for key in getattr(module, "_non_persistent_buffers_set", ()):
                    buffer = module._buffers.get(key)
                    if buffer is not None and buffer.layout == torch.strided and not hasattr(buffer, "fake_mode"):
                        found[f"{name}.{key}"] = hashlib.sha256(bytes_of(buffer).cpu().numpy().tobytes()).digest()
        return found

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """A context in which all ranks have the same buffers, for a checkpoint; then, each has its own again."""
        plan, collectives = self._session.plan, self._session.collectives
        with buffers_kept(modules := self.each):
            if plan.data_shard[1] > 1:
                average(named_buffers(modules), collectives)
            elif plan.splits_network:  # the process of the last stage computes the loss
                collectives.broadcast([*named_buffers(modules[1:]).values()], source=collectives.world_size - 1)
            else:
                collectives.barrier()  # all updates of shared memory are written
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which all ranks have the same buffers in evaluation mode; then, they train as before."""
        for module in self.each:
            module.eval()
        with self.synchronized():
            yield
        self.train()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context in which the network may assign attributes and buffers; then, it has those from before again."""
        modules = (each for each in self._model.modules() if not isinstance(each, torch.jit.ScriptModule))
        attributes = [(module, {**vars(module)}, {**module._buffers}) for module in modules]
        yield
        for module, own, buffers in attributes:
            for name in [name for name in vars(module) if name not in own and name[0] != "_"]:
                delattr(module, name)
            vars(module).update(own)
            module._buffers.clear()
            module._buffers.update(buffers)

    def of_rank(self) -> dict[str, Any]:
        """Return copies of the buffers and the extra state by name, if each rank has its own."""
        if not self.replicas:
            return {}
        extra = {name: copy.deepcopy(module.get_extra_state()) for name, module in self._with_extra_state().items()}
        return extra | {name: each.clone() for name, each in named_buffers(self.each).items()}

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

    def load(self, of_loss: list[dict[str, Any]], of_rank: dict[str, Any], replicas: list[int]) -> None:
        """Load what `loss_state` returned, and what `only_of_rank` did, if `replicas` were as many as now.

        Raises:
            ConfigError: if the loss is another one.
            UnexpectedContentError: if the buffers of the rank are not of these modules.
        """
        self._load_loss(of_loss)
        if self.replicas and replicas == self.replicas:
            own, extra = named_buffers(self.each), self._with_extra_state()
            own = {name: each for name, each in own.items() if name in of_rank}
            check_like(of_rank, own | dict.fromkeys(extra, object), "the buffers of a rank")
            for name, buffer in own.items():
                buffer.copy_(of_rank[name])
            for name, module in extra.items():
                module.set_extra_state(of_rank[name])

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
