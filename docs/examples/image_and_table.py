"""Two inputs, an image and a row of a table: `python -m runner workload=image_and_table.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32))
        self.row = nn.Linear(8, 32)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(32, 10))

    def forward(self, image, row):
        return self.head(self.image(image) + self.row(row))


model = Both


def data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return (images, images.mean((1, 2))), digits.target  # ((images, rows), classes)
