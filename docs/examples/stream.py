"""Characters of text that is read piece by piece: `python -m runner workload=stream.py steps=500`."""

import argparse
import inspect
import random
import tarfile

import torch
from torch import nn
from torch.utils.data import IterableDataset

LENGTH = 16


class Text(IterableDataset):
    def __init__(self, module):
        self.module = module

    def __iter__(self):
        for line in inspect.getsource(self.module).encode().splitlines():
            start = random.randrange(8)
            for first in range(start, len(line) - LENGTH, LENGTH):
                yield torch.tensor(list(line[first : first + LENGTH])), line[first + LENGTH]


def model():
    return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * LENGTH, 256))


data = Text(argparse), Text(tarfile)  # (training, held out)
