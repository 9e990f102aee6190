"""A file of a user that draws random numbers at its top level."""

import torch

model = torch.nn.Linear(6, 1)
data = torch.randn(40, 6)
teacher = torch.randn(6, 1)


def training_step(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch @ teacher).square().mean()
