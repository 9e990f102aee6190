"""Packs code of the user for the processes that this process starts: ranks, data workers, trials and jobs."""

from __future__ import annotations

import pickle
from inspect import isclass
from typing import Any

from runner.config.errors import ConfigError, check
from runner.config.user_code import UserCode, executed, give, given


def pack(value: Any) -> bytes:
    """Return `value`, which may have objects of the user, for `unpack` in a process that this process starts.

    What can be imported is sent by its name, and what is defined in a script or a notebook, by value.

    Raises:
        ConfigError: if this is impossible.
    """
    import cloudpickle

    try:
        content = cloudpickle.dumps(value)
    except Exception as error:
        why = f"it cannot be sent to other processes ({type(error).__name__}: {error})"
        remedy = "pass what is at the top level of a module, as a function that makes the network; or "
        remedy += "parallel=single data.workers=0, which starts no processes"
        raise ConfigError("code", ", ".join(given().names()), why, remedy) from error
    return pickle.dumps(([file.path for file in given().files.values()], content))


def unpack(content: bytes) -> Any:
    """Return what `pack` has packed; the files of the user are executed first, as the objects may be defined there."""
    paths, inner = pickle.loads(content)
    for path in paths:
        executed(path)
    return pickle.loads(inner)


def packed() -> bytes:
    """Return the code that is given, packed for another process; empty if there is none.

    Raises:
        ConfigError: as `pack`, and if parameters of a network that is passed have hooks, which torch leaves out.
    """
    model: Any = given().objects.get("model")
    parameters = model.named_parameters() if hasattr(model, "named_parameters") and not isclass(model) else ()
    hooked = [name for name, parameter in parameters if parameter._backward_hooks]
    why = f"hooks of parameters ({', '.join(hooked[:3])}) are not sent to other processes"
    check(not hooked, "model", type(model).__name__, why, "pass a function that makes the network and registers them")
    return pack(given()) if given() != UserCode() else b""


def give_packed(content: bytes) -> None:
    """Hold the code in this process that another has `packed`."""
    if content:
        give(unpack(content))
