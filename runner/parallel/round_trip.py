"""A proof, before the first step, that the state of a user's network and loss survives a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check, described
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives, bytes_of
from runner.parallel.full_state import collect, copied, load_module, local_part, without_state
from runner.parallel.modules import Modules
from runner.parallel.session import Session
from runner.storage.checkpoint import beside_tensors, reread
from runner.storage.state_dict import with_versions
from runner.storage.value_checks import is_finite


def check_dense(model: torch.nn.Module) -> None:
    """Refuse a parameter that is sparse, of which modes and checkpoints know no part, or that has no value."""
    for name, parameter in model.named_parameters():
        why = f"parameter {name} is sparse, and a checkpoint holds dense tensors alone"
        check(parameter.layout == torch.strided, "model", _given("model"), why, "let it be dense: to_dense()")
        why, remedy = f"parameter {name} is on the device meta, without a value", "make the network on the CPU"
        check(not parameter.is_meta, "model", _given("model"), why, remedy)


def check_round_trip(modules: Modules, parallel: Parallel, session: Session) -> None:
    """Save the modules of a run in memory, and load them again; they then have the same bits. Called on every rank.

    Raises:
        ConfigError: if a part of their state cannot be saved, or is not loaded as it was.
    """
    (model, *losses), collectives = modules.each, session.collectives
    stateless = without_state(model)  # as copies of the moments would take twice the memory of the weights
    with modules.synchronized():
        with _refused("model"):
            if session.plan.num_members:  # each rank has its own
                state = _read_again(collect(model, stateless, keep=True)[0], "model")
            else:
                state = _sent_to_all(parallel.full_state(model, stateless)[0], collectives)
            before = _emptied(model, collectives)
            parallel.load_full_state(model, stateless, state, {})
            _check_restored(model, before, "model")
        for loss in losses:
            with _refused("loss"):
                state = _read_again(copied(loss.state_dict()), "loss")
                before = _emptied(loss, collectives)
                load_module(loss, state, "the loss")
                _check_restored(loss, before, "loss")


def _sent_to_all(state: dict[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Return the state that rank 0 has, as a checkpoint would hold it, on every rank."""
    state = collectives.on_all_ranks(lambda: _read_again(state, "model"))
    dense = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    forms = {name: (tuple(each.shape), each.dtype) if name in dense else None for name, each in state.items()}
    others = {name: each for name, each in state.items() if name not in dense}
    forms, others = collectives.from_rank_0(lambda: (forms, others))
    dense |= {n: torch.empty(form[0], dtype=form[1]) for n, form in forms.items() if form and n not in dense}
    collectives.broadcast([dense[name] for name, form in forms.items() if form])
    return with_versions({name: dense[name] if form else others[name] for name, form in forms.items()}, state)


def _read_again(state: dict[str, Any], part: str) -> dict[str, Any]:
    """Return `state` with what safetensors cannot hold written and read again; all of it is checked."""
    given = _given(part)
    for name, value in state.items():
        check(isinstance(name, str), part, given, f"its state_dict() has the key {name!r}", "let all keys be texts")
        dense = not isinstance(value, torch.Tensor) or (value.layout == torch.strided and not value.is_quantized)
        remedy = "register_buffer(…, persistent=False), if it can be computed anew, or a dense tensor"
        check(dense, part, given, f"{name} is no dense tensor, and a checkpoint holds no others", remedy)
    for name, value in beside_tensors(state).items():
        try:
            state[name] = reread(value)
        except Exception as error:  # of `pickle`, torch, or methods of the object
            why = f"{name} cannot be saved and loaded again: {described(error)}"
            remedy = "let it be made of numbers, texts, tensors, lists and dicts, or leave it out of the state"
            raise ConfigError(part, given, why, remedy) from error
    return state


def _emptied(module: torch.nn.Module, collectives: Collectives) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Fill what is saved or trained with zeros, and return each such tensor with a copy of it, by name."""
    saved = {
        local_part(each.detach()).data_ptr() for each in module.state_dict().values() if isinstance(each, torch.Tensor)
    }
    named = [*module.named_parameters(), *module.named_buffers()]
    dense = [
        (name, local_part(each.detach()), each.requires_grad) for name, each in named if each.layout == torch.strided
    ]
    kept = [(name, each) for name, each, is_trained in dense if is_trained or each.data_ptr() in saved]
    copies = {name: (each, each.clone()) for name, each in kept if each.numel() and is_finite(each)}
    collectives.barrier()  # processes may share memory
    for each, _ in copies.values():
        each.zero_()
    collectives.barrier()
    return copies


def _check_restored(module: torch.nn.Module, before: dict[str, tuple[torch.Tensor, torch.Tensor]], part: str) -> None:
    lost = [name for name, (now, then) in before.items() if not bytes_of(now).equal(bytes_of(then))]
    why = f"its load_state_dict() does not restore {', '.join(lost[:3])}"
    remedy = "let state_dict() return it, and load_state_dict() take what that returned"
    check(not lost, part, _given(part), why, remedy)


def _given(part: str) -> Any:
    names = user_code.given().names()
    return names.get(part, names.get("workload", ABSENT))


@contextmanager
def _refused(part: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        why = f"its state cannot be saved and loaded again: {described(error)}"
        remedy = "correct its state_dict() or load_state_dict(), or what they call"
        raise ConfigError(part, _given(part), why, remedy) from error
