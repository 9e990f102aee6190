"""Contrastive pairs without labels (SimCLR): `python -m runner workload=simclr.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import Dataset

GROUP = 4  # images whose views are told from each other: a batch that is divided keeps its groups


class Views(Dataset):
    def __init__(self):
        self.images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        def view():
            shift = torch.randint(-1, 2, (2,)).tolist()  # the same in every mode: drawn for this sample
            return self.images[index].roll(shift, (1, 2)) + 0.1 * torch.randn(1, 8, 8)

        return {"one": view(), "other": view()}


def model():
    encoder = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten())
    return nn.ModuleDict({"encoder": encoder, "projection": nn.Linear(512, 32)})


data = Views


def embedded(model, batch):
    encoder, projection = model["encoder"], model["projection"]
    return (normalize(projection(encoder(batch[name]))) for name in ("one", "other"))


def training_step(model, batch):
    one, other = (each.view(-1, GROUP, 32) for each in embedded(model, batch))
    similar = one @ other.transpose(1, 2) / 0.2  # [groups, GROUP, GROUP]
    pairs = torch.arange(GROUP, device=similar.device).expand(len(similar), -1)
    return {"loss": cross_entropy(similar, pairs), "accuracy": (similar.argmax(1) == pairs).to(similar.dtype).mean()}


def evaluation_step(model, batch):
    one, other = embedded(model, batch)
    return {"loss": 1 - (one * other).sum(1).mean()}
