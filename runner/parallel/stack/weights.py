"""The weights of several networks as stacked tensors, of which those of each network are views."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Weights:
    """The parameters and the buffers of several networks, stacked: [number of networks, …], by name."""

    def __init__(self, models: Sequence[torch.nn.Module]):
        self._models = models
        self._parameters = [dict(each.named_parameters()) for each in models]
        self._buffers = [dict(each.named_buffers()) for each in models]
        names = self._parameters[0] if models else {}
        self._stacked = {name: _stacked([each[name] for each in self._parameters]) for name in names}
        self.buffers = {n: _stacked([each[n] for each in self._buffers]) for n in (self._buffers[0] if models else ())}
        self._pointers: list[tuple[torch.Tensor, int]] = []

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The stacked parameters, as new tensors, of which gradients may be taken."""
        return {name: each.detach() for name, each in self._stacked.items()}

    def share(self) -> None:
        """Let the parameters and buffers of each network be views of the stacked ones."""
        for own, stacked in ((self._parameters, self._stacked), (self._buffers, self.buffers)):
            for name, whole in stacked.items():
                for tensors, part in zip(own, whole.unbind(0), strict=True):
                    tensors[name].data = part
                    self._pointers.append((tensors[name], part.data_ptr()))

    def are_of(self, models: Sequence[torch.nn.Module]) -> bool:
        """Return whether these are the weights of `models`, which an average of them may have replaced for a while."""
        same = len(models) == len(self._models) and all(map(lambda a, b: a is b, models, self._models))
        return same and all(tensor.data_ptr() == pointer for tensor, pointer in self._pointers)

    def set_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add the stacked `gradients` to those of each network."""
        for name, whole in gradients.items():
            for parameters, part in zip(self._parameters, whole.unbind(0), strict=True):
                parameter = parameters[name]
                if parameter.grad is not None:
                    parameter.grad.add_(part)
                elif part.stride() == parameter.stride():
                    parameter.grad = part
                else:
                    parameter.grad = torch.empty_like(parameter).copy_(part)

    def set_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        for name, whole in buffers.items():
            self.buffers[name].copy_(whole)


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one, [number of tensors, …], each in its own memory format."""
    first = tensors[0]
    whole = first.new_empty(len(tensors), first.numel())
    steps = zip(first.shape, first.stride(), strict=True)
    is_dense = first.numel() == 1 + sum((size - 1) * step for size, step in steps)
    strides = first.stride() if is_dense else first.new_empty(first.shape, device="meta").stride()
    whole = whole.as_strided((len(tensors), *first.shape), (first.numel(), *strides))
    for part, tensor in zip(whole.unbind(0), tensors, strict=True):
        part.copy_(tensor.detach())
    return whole
