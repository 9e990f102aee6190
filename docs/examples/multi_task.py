"""Two tasks of one network, with a curve for each: `python -m runner workload=multi_task.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.digit, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x):
        x = self.body(x)
        return {"digit": self.digit(x), "ink": self.ink(x)[:, 0]}


model = TwoHeads


def data():
    inputs, digit = load_digits(return_X_y=True)
    inputs = torch.tensor(inputs, dtype=torch.float32) / 16
    return inputs, {"digit": torch.tensor(digit), "ink": inputs.mean(1)}


def loss(outputs, targets):
    digit, ink = cross_entropy(outputs["digit"], targets["digit"]), mse_loss(outputs["ink"], targets["ink"])
    right = (outputs["digit"].argmax(1) == targets["digit"]).sum()
    return {"loss": digit + ink, "digit": digit, "ink": ink, "accuracy": (right, len(targets["digit"]))}
