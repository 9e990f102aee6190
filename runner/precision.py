"""Precisions: the floating-point formats of the forward pass, the gradients and the update."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from runner.config.errors import check
from runner.config.limits import PositiveInt, Range
from runner.storage.value_checks import check_like
from runner.system import accelerator
from runner.system.torch_private import found_inf_flags
from runner.system.trees import doubled

log = logging.getLogger(__name__)


@dataclass
class Precision:
    """float32 without TF32, and the base class of all precisions.

    Parameters and checkpoints are float32 in every precision but `64`, where they are float64.
    """

    description: ClassVar[str] = "float32"

    tolerance: ClassVar[float] = 1e-6
    """The largest relative difference of weights, after a few steps, to expect between a mode and a single device."""

    keeps_double: ClassVar[bool] = False
    """Whether inputs in float64 are not rounded to float32."""

    def check_device(self, device: torch.device) -> None:
        """Raise a `ConfigError` if `device` does not support this precision."""

    def prepare(self, device: torch.device) -> None:
        """Set torch's global flags for `device`; called once per run."""
        _allow_tf32(False)

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert the parameters of `model`, in place, to their dtype in this precision, and return `model`."""
        return model

    def compute_dtype(self, device: torch.device) -> torch.dtype | None:
        """Return the 16-bit dtype of forward passes on `device`; None if they use the dtype of the parameters."""
        return None

    def autocast(self) -> AbstractContextManager:
        """Return a context manager for forward passes."""
        return nullcontext()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` multiplied by the loss scale, by which `step` later divides the gradients."""
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the scaled `loss` to the gradients of the parameters."""
        self.scaled(loss).backward()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], torch.Tensor] | None,
        combine_overflow: Callable[[torch.Tensor], None] | None = None,
        update: Callable[[], None] | None = None,
    ) -> torch.Tensor | None:
        """Unscale and clip the gradients, update the parameters, and set the gradients to None.

        Args:
            optimizer: the optimizer of the parameters.
            clip: function that clips the gradients and returns their norm before; None for no clipping.
            combine_overflow: function that sets an overflow flag, in place, to its maximum over the ranks, if they hold
                the gradients of different parameters; None if they do not, or torch combines the flags.
            update: function that updates the parameters; None for the `step` of the optimizer, which loss scaling calls
                in any case if it is fused.

        Returns:
            The norm before clipping, a scalar on the device; None if `clip` is None and there is no loss scaling.
        """
        norm = clip() if clip is not None else None
        (update or optimizer.step)()
        _drop_gradients(optimizer)
        return norm

    def num_skipped(self) -> int:
        """Return the number of updates that were skipped because the scaled gradients overflowed."""
        return 0

    def scalars(self) -> dict[str, torch.Tensor | float]:
        """Return the scalars to log, keyed by TensorBoard tag."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaling; empty if the precision has none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the loss scaling, which `state_dict` of this or another precision returned."""


@dataclass
class TF32(Precision):
    """float32 with matrix products and convolutions in TF32 (10 bits of mantissa) on Ampere and later GPUs."""

    description: ClassVar[str] = "float32, matrix products and convolutions in TF32 where the device has it"
    tolerance: ClassVar[float] = 5e-3

    def prepare(self, device: torch.device) -> None:
        supported = accelerator.has_tf32(device)
        _allow_tf32(supported)  # not on a CPU, where the flag may allow oneDNN to use a lower precision
        if not supported:
            log.warning("precision=tf32: %s has no TF32 units, so it computes in float32", device)


@dataclass
class Double(Precision):
    """float64 throughout, to check gradients."""

    description: ClassVar[str] = "float64"
    tolerance: ClassVar[float] = 1e-13
    keeps_double: ClassVar[bool] = True

    def check_device(self, device: torch.device) -> None:
        supported = device.type == "cpu" or accelerator.has_float64(device)
        check(supported, "precision", "64", f"{device} has no float64", "choose device=cpu or precision=32")

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        # Data sets may yield float32 inputs; a hook of the model converts them in all parallel modes.
        model.register_forward_pre_hook(_inputs_to_double, with_kwargs=True)
        for each in (*model.parameters(), *model.buffers()):
            if each.is_complex():  # which `double` leaves out
                each.data = each.data.to(torch.complex128)
        return model.double()


@dataclass
class BFloat16(Precision):
    """bfloat16 autocast: 16 bits with the range of float32, so that no loss scaling is needed."""

    description: ClassVar[str] = "bfloat16 autocast, float32 weights"
    tolerance: ClassVar[float] = 4e-2

    _device_type = "cpu"

    def prepare(self, device: torch.device) -> None:
        _allow_tf32(False)
        self._device_type = device.type
        self._dtype = self.compute_dtype(device)
        instructions = torch.backends.cpu.get_cpu_capability()
        if device.type == "cpu" and not instructions.startswith(("AVX512", "SVE")):  # oneDNN needs them
            log.warning("bfloat16 is many times slower than float32 on this CPU, which has no instructions for it")

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        return torch.bfloat16

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self._device_type, self._dtype)


@dataclass
class Float16(BFloat16):
    """float16 autocast with loss scaling on an accelerator (Micikevicius et al., Mixed Precision Training, 2018).

    On a CPU, where float16 convolutions are about 50 times slower, and on a device where torch does not scale
    gradients, autocast uses bfloat16 instead, with a warning. An update whose gradients overflow is skipped, and
    neither the schedule nor an average of the weights or a target network advances. The options are explained in
    `conf/precision/16.yaml`.
    """

    description: ClassVar[str] = "float16 autocast with loss scaling on a GPU, bfloat16 on a CPU; float32 weights"

    init_scale: Annotated[float, Range(above=0, most=2**32)] = 65536.0
    growth_interval: PositiveInt = 2000

    def __post_init__(self) -> None:
        self._scaler: torch.amp.GradScaler | None = None
        self._skipped = 0
        self._pending: tuple[torch.Tensor, torch.Event | None] | None = None

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        if not accelerator.scales_float16(device):
            log.warning("precision=16: %s computes in bfloat16, as it has no fast float16", device.type)
            return
        self._scaler = torch.amp.GradScaler(
            device.type, init_scale=self.init_scale, growth_interval=self.growth_interval
        )

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        return torch.float16 if accelerator.scales_float16(device) else torch.bfloat16

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], torch.Tensor] | None,
        combine_overflow: Callable[[torch.Tensor], None] | None = None,
        update: Callable[[], None] | None = None,
    ) -> torch.Tensor | None:
        if self._scaler is None:
            return super().step(optimizer, clip, update=update)
        self._scaler.unscale_(optimizer)
        flags = found_inf_flags(self._scaler, optimizer)
        for other in flags[1:]:  # of other devices: GradScaler adds them up, but fused kernels only skip if it is 1
            torch.maximum(flags[0], other.to(flags[0].device, non_blocking=True), out=flags[0])
            other.zero_()
        if combine_overflow is not None:
            combine_overflow(flags[0])
        norm = clip() if clip is not None else _gradient_norm(optimizer)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self._scaler.step(optimizer)  # it is fused, and reads the flag on the device: no sync
        elif not any(flag.item() for flag in flags):
            (update or optimizer.step)()
        self._scaler.update()
        _drop_gradients(optimizer)
        self.num_skipped()  # counts the previous step, whose flag has been copied by now
        finite = torch.isfinite(norm)
        for found_inf in flags[:1]:  # an overflow may be on another rank or device than the norm
            finite = finite & (found_inf.to(norm.device, non_blocking=True) == 0)
        in_background = accelerator.has_streams(norm.device)
        copy = finite.to("cpu", non_blocking=in_background)
        self._pending = copy, _record_event(norm.device) if in_background else None
        return norm

    def num_skipped(self) -> int:
        if self._pending is not None:
            finite, copied = self._pending
            if copied is not None:
                copied.synchronize()
            self._skipped += not bool(finite)
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
        if not state:
            return
        check_like(state, {"skipped": int, "scaler": dict}, "precision")
        self._skipped = state["skipped"]
        if self._scaler is not None and state["scaler"]:
            like = {key: type(value) for key, value in self._scaler.state_dict().items()}
            check_like(state["scaler"], like, "precision, scaler")
            self._scaler.load_state_dict(state["scaler"])


def _allow_tf32(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def _inputs_to_double(_: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return doubled((inputs, options))


def _record_event(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))  # by default, it would be a stream of the current device
    return event


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set the gradients to None. The bookkeeping of `zero_grad` takes 2 % of the time of a small network's step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _gradient_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # the norm of DTensor gradients is a DTensor
