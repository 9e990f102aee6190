"""From which module is a line of Python? Batches are dicts, padded: `python -m runner workload=text_classifier.py`."""

import argparse
import inspect
import tarfile

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

MODULES = argparse, tarfile


def model():
    return Classifier()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(256, 32), nn.Linear(32, len(MODULES))

    def forward(self, ids, mask):  # by the names in the dict
        mask = mask.unsqueeze(2)
        return self.head((self.table(ids) * mask).sum(1) / mask.sum(1))


def data():
    lines = [(line, number) for number, module in enumerate(MODULES) for line in inspect.getsource(module).splitlines()]
    return [(torch.tensor(list(line.encode())), number) for line, number in lines if line.strip()]


def collate(samples):
    lines, labels = zip(*samples, strict=True)
    mask = [torch.ones(len(line)) for line in lines]
    ids, mask = pad_sequence(lines, batch_first=True), pad_sequence(mask, batch_first=True)
    return {"ids": ids, "mask": mask, "labels": torch.tensor(labels)}
