"""The targets are the inputs: `python -m runner workload=autoencoder.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn


def model():
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))
    return nn.Sequential(encoder, decoder)


def data():
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    return images, images  # floating-point targets: the default loss is the mean squared error
