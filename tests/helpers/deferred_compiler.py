"""`python -m helpers.deferred_compiler` trains before and after the compiler is loaded, in a process of its own."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch

from runner.system.torch_private import defer_compiler


def trained(optimizer: type[torch.optim.Optimizer], compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    updates = optimizer(model.parameters(), lr=0.1)  # pyright: ignore[reportCallIssue]

    def step() -> None:
        updates.zero_grad()
        model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        updates.step()

    for _ in range(3):
        (torch.compile(step, backend="eager") if compiled else step)()
    updates.load_state_dict(updates.state_dict())
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def main() -> None:
    defer_compiler()
    optimizers = (torch.optim.SGD, torch.optim.Adam)
    before = [trained(each) for each in optimizers]
    assert "torch._dynamo.eval_frame" not in sys.modules, "training without the compiler must not load it"

    config = import_module("torch._dynamo.config")  # loads it, starting with a submodule that rejects new attributes
    from torch._dynamo import eval_frame

    assert torch._dynamo.config is config
    assert torch._dynamo is sys.modules["torch._dynamo"]
    assert torch._dynamo.eval_frame is eval_frame
    assert torch._dynamo.graph_break.__module__ == "torch._dynamo.decorators"
    assert [trained(each) for each in optimizers] == before
    # Functions that `torch._disable_dynamo` decorates are hidden from the compiler even if they were called before.
    hidden = torch.optim.Optimizer.zero_grad.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    assert vars(hidden)["__dynamo_disable"]._torchdynamo_disable
    for each, values in zip(optimizers, before, strict=True):
        assert trained(each, compiled=True) == pytest.approx(values, rel=1e-5)
    print("trained")


if __name__ == "__main__":
    main()
