"""Two networks that are trained in turn, with an optimizer each: `python -m runner workload=gan.py`."""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset


class Points(Dataset):
    """Points on a circle, and the noise from which fakes are made."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        angle = 6.283 * torch.rand(())
        return {"real": torch.stack((angle.cos(), angle.sin())), "noise": torch.randn(4)}


def layers(num_inputs, num_outputs):
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_outputs))


def model():
    return nn.ModuleDict({"generator": layers(4, 2), "discriminator": layers(2, 1)})


data = Points


def fakes(model, batch):
    generator = model["generator"]
    return generator(batch["noise"])


def discriminator_step(model, batch):
    discriminator = model["discriminator"]
    return softplus(-discriminator(batch["real"])).mean() + softplus(discriminator(fakes(model, batch).detach())).mean()


def generator_step(model, batch):
    discriminator = model["discriminator"]
    return softplus(-discriminator(fakes(model, batch))).mean()


phases = {"discriminator": discriminator_step, "generator": generator_step}


def evaluation_step(model, batch):
    """How far the fakes are from the circle."""
    return {"loss": (fakes(model, batch).norm(dim=1) - 1).abs().mean()}
