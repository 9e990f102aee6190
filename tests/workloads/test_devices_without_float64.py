"""Tests that a step and an evaluation create no float64 tensor on a device that may not have this type, as Metal."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from helpers.compose import build_composed_run
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from runner.device import sum_dtype
from runner.parallel.collectives import Collectives
from runner.system import accelerator
from runner.system.fake_tensors import fake_tensors
from runner.training import initial_state, train_step

DEVICE = torch.device("lazy", 0)
"""A type of device for which torch makes fake tensors on any machine, unlike `mps`."""


class WithoutFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, torch.Tensor) and each.device == DEVICE and each.dtype == torch.float64:
                raise TypeError(f"{func}: the device has no float64")
        return result


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch 2.11 refuses to ask `lazy` for its memory")
@pytest.mark.parametrize(
    "overrides",
    [
        (
            *("model=tiny", "data=synthetic", "data.size=8", "data.num_samples=90", "data.holdout=20"),
            *("workload.balance_classes=true", "ema.decay=0.5"),
        ),
        ("workload=regression",),
        ("workload=dqn", "workload.normalize=true"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_step_and_an_evaluation_need_no_float64(overrides, tmp_path):
    run = build_composed_run(*overrides, "batch_size=8", "optimizer.fused=false")
    workload, session = run.workload, run.prepare(Collectives([DEVICE]))
    with fake_tensors() as mode, WithoutFloat64():
        state, plan = initial_state(run, session, tmp_path), session.plan
        batches = workload.fake_batches(state.model, plan, DEVICE) or workload.batches(state.model, plan, 0, DEVICE)
        train_step(state, batches, next(plan.steps(0, 1)), log_due=True)
        held_out: Any = getattr(workload, "held_out", None)
        if held_out is None:  # the environments of an agent need values
            return
        held_out.inputs, held_out.targets = mode.from_tensor(held_out.inputs), mode.from_tensor(held_out.targets)
        with torch.no_grad():
            sums = workload.evaluate(partial(run.parallel._infer, state.model), (0, 1), DEVICE)
        with suppress(DataDependentOutputException, DynamicOutputShapeException):  # it needs values in the end
            workload.summarize(sums)


def test_sums_are_computed_in_float64_where_the_device_has_it(monkeypatch):
    assert sum_dtype(torch.device("cpu")) == torch.float64
    for has_float64, dtype in ((True, torch.float64), (False, torch.float32)):
        monkeypatch.setattr(accelerator, "has_float64", lambda device, answer=has_float64: answer)
        assert sum_dtype(torch.device("cuda")) == dtype
