"""Arithmetic: which number format the forward pass, the gradients and the update use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runner.config.errors import check, check_range

log = logging.getLogger(__name__)

_FULL = nullcontext()


@dataclass
class Precision:
    """float32 throughout, without TF32: the base that the other precisions change.

    A mode of computing only: parameters and checkpoints stay float32 (float64 under `64`).
    """

    description: ClassVar[str] = "float32"

    tolerance: ClassVar[float] = 1e-6
    """How far weights and gradients may be from one device's after a few steps, relative: sums in another order."""

    def check_device(self, device: torch.device) -> None:
        """Refuse a device that cannot do this precision, with a `ConfigError`."""

    def prepare(self, device: torch.device) -> None:
        """Set what is set once a run."""
        _allow_tf32(False)

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model in the format that its parameters are kept in."""
        return model

    def compute_dtype(self, device: torch.device) -> torch.dtype | None:
        """The 16-bit format of a forward pass on `device`; None where it is the parameters' own."""
        return None

    def autocast(self) -> AbstractContextManager:
        """The context of a forward pass."""
        return _FULL

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What to differentiate in the place of `loss`: `step` divides the gradients again."""
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` (scaled, where losses are scaled) to the parameters'."""
        self.scaled(loss).backward()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], torch.Tensor] | None,
        anywhere: Callable[[torch.Tensor], None] = lambda flag: None,
    ) -> torch.Tensor | None:
        """Unscale, clip, update, and drop the gradients.

        Args:
            clip: clips the gradients and returns their norm before that; None where neither is wanted.
            anywhere: sets a flag on the device to the largest of all ranks that hold parts of one gradient.

        Returns:
            The gradients' norm, a scalar on the device, where it was computed.
        """
        norm = clip() if clip is not None else None
        optimizer.step()
        _drop_gradients(optimizer)
        return norm

    def num_skipped(self) -> int:
        """How many updates were left out so far, because scaled gradients overflowed."""
        return 0

    def scalars(self) -> dict[str, torch.Tensor | float]:
        """What to log beside the metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a run, which another precision may have written."""


@dataclass
class TF32(Precision):
    """float32 with matrix products in TensorFloat-32 on Ampere and later: 10 bits of mantissa, much faster."""

    description: ClassVar[str] = "float32, matrix products in TF32 where the device has it"
    tolerance: ClassVar[float] = 5e-3

    def prepare(self, device: torch.device) -> None:
        able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        _allow_tf32(able)  # only where it is meant: on a CPU the same switch may allow oneDNN to round too
        if not able:
            log.warning("precision=tf32: %s has no TF32 units: this is float32 here", device)


@dataclass
class Double(Precision):
    """float64 throughout: for checking gradients, not for speed."""

    description: ClassVar[str] = "float64"
    tolerance: ClassVar[float] = 1e-13

    def check_device(self, device: torch.device) -> None:
        check(device.type != "mps", "precision", "64", "Metal has no float64", "choose device=cpu or precision=32")

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        # Inputs come as float32 from every data set; the model's own border is the one place that all modes pass.
        model.register_forward_pre_hook(_inputs_to_double)
        return model.double()


@dataclass
class BFloat16(Precision):
    """bfloat16 autocast: float32's range in 16 bits, so that no loss scaling is needed."""

    description: ClassVar[str] = "bfloat16 autocast, float32 weights"
    tolerance: ClassVar[float] = 4e-2

    _device_type = "cpu"

    def prepare(self, device: torch.device) -> None:
        _allow_tf32(False)
        self._device_type = device.type
        self._dtype = self.compute_dtype(device)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        return torch.bfloat16

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self._device_type, self._dtype)


@dataclass
class Float16(BFloat16):
    """float16 autocast with loss scaling on CUDA (Micikevicius et al., Mixed Precision Training, 2018).

    CPUs have no float16 convolutions (50 times slower here): there, and on Metal, it is bfloat16, and says so. An
    update whose gradients overflowed is skipped, and the schedule does not advance.
    """

    description: ClassVar[str] = "float16 autocast with loss scaling on CUDA, bfloat16 elsewhere; float32 weights"

    init_scale: float = 65536.0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        check_range(self, "init_scale", above=0, most=2**32)
        check_range(self, "growth_interval", least=1)
        self._scaler: torch.amp.GradScaler | None = None
        self._skipped = 0
        self._pending: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        if device.type != "cuda":
            log.warning("precision=16: %s computes in bfloat16, having no fast float16", device.type)
            return
        self._scaler = torch.amp.GradScaler("cuda", init_scale=self.init_scale, growth_interval=self.growth_interval)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        return torch.float16 if device.type == "cuda" else torch.bfloat16

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], torch.Tensor] | None,
        anywhere: Callable[[torch.Tensor], None] = lambda flag: None,
    ) -> torch.Tensor | None:
        if self._scaler is None:
            return super().step(optimizer, clip)
        self._scaler.unscale_(optimizer)
        overflows = _overflows(self._scaler, optimizer)
        for overflow in overflows:
            anywhere(overflow)
        norm = clip() if clip is not None else _gradient_norm(optimizer)
        self._scaler.step(optimizer)  # a fused optimizer is told of an overflow on the device: no sync
        self._scaler.update()
        _drop_gradients(optimizer)
        self.num_skipped()  # the step before this one, whose flag has long arrived
        finite = torch.isfinite(norm)
        for overflow in overflows:  # on another rank, or another device
            finite = finite & (overflow.to(norm.device, non_blocking=True) == 0)
        self._pending = finite.to("cpu", non_blocking=True), _arrival(norm.device)
        return norm

    def num_skipped(self) -> int:
        if self._pending is not None:
            flag, event = self._pending
            if event is not None:
                event.synchronize()
            self._skipped += not bool(flag)
            self._pending = None
        return self._skipped

    def scalars(self) -> dict[str, torch.Tensor | float]:
        if self._scaler is None:
            return {}
        return {"train/loss_scale": self._scaler.get_scale(), "train/skipped_steps": float(self.num_skipped())}

    def state_dict(self) -> dict[str, Any]:
        scaler = {} if self._scaler is None else self._scaler.state_dict()
        return {"skipped": self.num_skipped(), "scaler": scaler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = state.get("skipped", 0)
        if self._scaler is not None and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])


def _allow_tf32(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def _inputs_to_double(_: torch.nn.Module, inputs: tuple) -> tuple:
    return tuple(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)


def _arrival(device: torch.device) -> torch.cuda.Event | None:
    """When all that is queued on `device` by now is done; None where nothing is ever queued."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # by itself it takes the current device's stream
    return event


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """`zero_grad(set_to_none=True)` without its bookkeeping, which costs a small network 2 % of a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _overflows(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The flags that `unscale_` has set, one a device: `step` and `update` go by them. torch has no public name."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def _gradient_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of parts on several processes: of the whole
