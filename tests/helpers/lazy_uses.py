"""`python -m helpers.lazy_uses NAME` imports torch lazily, calls `FIRST_USES[NAME]`, and checks that torch works."""

# ruff: noqa: F401
from __future__ import annotations

import sys
from collections.abc import Callable


def attribute() -> None:
    import torch

    torch.zeros(1)


def submodule_of_the_other_package() -> None:
    import torchvision.transforms.v2


def inspection() -> None:
    import inspect

    inspect.getmodule(inspect.currentframe())  # reads the `__file__` of every module


def submodule() -> None:
    import torch.utils.data


def unpickling() -> None:
    import copyreg
    import pickle

    pickle.loads(b"ctorch._utils\n_rebuild_tensor_v2\n.")


USES = (attribute, submodule_of_the_other_package, inspection, submodule, unpickling)
FIRST_USES: dict[str, Callable[[], None]] = {use.__name__: use for use in USES}


def check_loaded_once() -> None:
    import torch
    import torch.nn
    import torch.utils._pytree

    assert torch.utils is sys.modules["torch.utils"]
    assert torch.nn is sys.modules["torch.nn"]
    assert torch.utils._pytree is sys.modules["torch.utils._pytree"]
    assert type(torch).__name__ == "module"
    assert (torch.__spec__.name, torch.nn.__spec__.origin) == ("torch", torch.nn.__file__)
    model = torch.nn.Linear(2, 1)
    assert isinstance(model, sys.modules["torch.nn"].Module)
    model(torch.ones(1, 2)).sum().backward()
    import torchvision

    assert torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5).tolist() == [0]


def main() -> None:
    from runner.system.lazy_import import import_lazily

    import_lazily("torch", "torchvision")
    import torch
    import torchvision

    assert "torch._C" not in sys.modules, "an import loads nothing"
    FIRST_USES[sys.argv[1]]()
    check_loaded_once()


if __name__ == "__main__":
    main()
