"""Samples of several inputs and of unequal lengths, networks that take them, and losses that are means over tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, nll_loss

from helpers.compose import compose_config
from helpers.strange_networks import CPU, case, trained_with
from runner.config import user_code
from runner.models.gpt import GPT

COUNT, LENGTH, CLASSES = 48, 5, 3
WEIGHTS = torch.tensor([1.0, 3.0, 0.5])
IGNORED = -100


def lengths() -> torch.Tensor:
    return torch.randint(1, LENGTH + 1, (COUNT,), generator=torch.Generator().manual_seed(1))


def tokens(ignored: int = IGNORED) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [n, length], and the class of each token, ignored where a sample is shorter; of every 12th, all are."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 20, (COUNT, LENGTH), generator=generator)
    padding = torch.arange(LENGTH) >= lengths()[:, None]
    padding[::12] = True
    return inputs, (inputs * 7 % 5 % CLASSES).masked_fill(padding, ignored)


class PerToken(nn.Sequential):
    """Logits [n, classes, length] of inputs [n, length], in blocks that a pipeline can cut."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(20, 8), Hidden(8, 8), Hidden(8, 8), Head(8, CLASSES))


class Hidden(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).tanh()


class Head(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).transpose(1, 2)


def pair_of_sum_and_count(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(outputs, targets, reduction="sum"), (targets != IGNORED).sum()


def several_values(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    valid = targets != IGNORED
    total = cross_entropy(outputs, targets, reduction="sum")
    right = ((outputs.argmax(1) == targets) & valid).sum()
    return {"right": (right, valid.sum()), "loss": (total, valid.sum()), "size": outputs.square().mean()}


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, WEIGHTS.to(outputs), label_smoothing=0.1)


def log_likelihood(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nll_loss(log_softmax(outputs, 1), targets)


def of_a_batch(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over 12 samples, which are a batch."""
    return cross_entropy(outputs, targets, reduction="sum") * 12 / len(targets)


class LogSoftmax(PerToken):
    def __init__(self) -> None:
        super().__init__()
        self.append(nn.LogSoftmax(1))


class Tied(nn.Sequential):
    """Logits [n, 20, length]. The last block has the weight of the first one: they are products with the embeddings."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(20, 8), Hidden(8, 8), Hidden(8, 8), Head(8, 20))
        self[3].weight = self[0].weight


GPT_OF_SEQUENCES = partial(GPT, 20, LENGTH, 2, 16, 4, kv_heads=2)


def mean_over_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of logits [n, length, classes]."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def sum_over_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pair_of_sum_and_count(outputs.flatten(0, 1), targets.flatten())


LOSSES: dict[str, tuple[Any, Any, Any]] = {
    "default": (PerToken, None, cross_entropy),
    "function": (PerToken, cross_entropy, cross_entropy),
    "module": (PerToken, nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), weighted),
    "ignored class": (PerToken, partial(cross_entropy, ignore_index=1), partial(cross_entropy, ignore_index=1)),
    "log-likelihood": (LogSoftmax, nn.NLLLoss(), nll_loss),
    "pair": (PerToken, pair_of_sum_and_count, cross_entropy),
    "sum": (PerToken, nn.CrossEntropyLoss(reduction="sum"), of_a_batch),
    "several values": (PerToken, several_values, cross_entropy),
    "tied": (Tied, None, cross_entropy),
    "gpt": (GPT_OF_SEQUENCES, sum_over_tokens, mean_over_tokens),
    "gpt recomputed": (partial(GPT_OF_SEQUENCES, checkpoint_activations=True), sum_over_tokens, mean_over_tokens),
}
"""By name: a network, the loss that is given, and the mean of a whole batch that is meant."""


class Padded:
    """Samples of unequal lengths."""

    def __init__(self) -> None:
        inputs, targets = tokens()
        self.samples = [(x[:n], y[:n]) for x, y, n in zip(inputs, targets, lengths().tolist(), strict=True)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[index]


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Return a batch as Hugging Face's collators do, padded to its longest sample."""
    inputs, targets = (list(each) for each in zip(*samples, strict=True))
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    mask = pad([torch.ones(len(each)) for each in inputs])
    return {"ids": pad(inputs), "mask": mask, "labels": pad(targets, padding_value=IGNORED)}


class Masked(nn.Module):
    """Logits of tokens that see the mean of the sample's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(16, CLASSES)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, mask = self.table(ids), mask[..., None].to(self.head.weight.dtype)
        mean = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return self.head(torch.cat((x, mean.expand_as(x)), 2)).transpose(1, 2)


class SeesPadding(Masked):
    """A mistake of a user: the mean is also over the padding, so that it depends on the other samples of a batch."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, torch.ones_like(mask))


class ImageAndTable(nn.Module):
    """Two inputs, in a first block that takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = TwoInputs(), nn.Tanh(), nn.Linear(8, 2)

    def forward(self, image: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(image, row)))

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("second", self.second), ("last", self.last)]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.row = nn.Linear(12, 8), nn.Linear(4, 8)

    def forward(self, image: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return self.image(image.flatten(1)) * self.row(row)


def images_and_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images, rows = torch.randn(COUNT, 3, 2, 2, generator=generator), torch.randn(COUNT, 4, generator=generator)
    return images, rows, (images.mean((1, 2, 3)) + rows.mean(1) > 0).long()


def two_tasks(outputs: torch.Tensor, targets: dict[str, torch.Tensor]) -> dict[str, Any]:
    classes = cross_entropy(outputs, targets["class"])
    distances = (outputs[:, 0] - targets["value"]).square().mean()
    return {"loss": classes + distances, "distance": distances}


IMAGES, ROWS, KINDS = images_and_rows()
INPUTS: dict[str, Any] = {
    "tuple": case(ImageAndTable, ((IMAGES, ROWS), KINDS)),
    "dict": case(ImageAndTable, ({"row": ROWS, "image": IMAGES}, KINDS)),
    "labels": case(ImageAndTable, {"row": ROWS, "image": IMAGES, "labels": KINDS}),
    "samples": case(ImageAndTable, [((i, r), k) for i, r, k in zip(IMAGES, ROWS, KINDS, strict=True)]),
    "several targets": case(ImageAndTable, ((IMAGES, ROWS), {"class": KINDS, "value": ROWS[:, 0]}), loss=two_tasks),
    "padded": case(Masked, Padded(), collate=collate),
    "sees padding": case(SeesPadding, Padded(), collate=collate),
}
CASES = INPUTS | {name: case(network, tokens(), loss=loss) for name, (network, loss, _) in LOSSES.items()}
CASES["ignored class"]["data"] = (tokens(1), tokens(1))


def config_of(name: str, *overrides: str) -> dict[str, Any]:
    return compose_config(*user_code.passed(**CASES[name]).added_to([*CPU, *overrides]))


def trained(name: str, config: dict[str, Any], directory: Path) -> Any:
    """Prove and train a run of `CASES[name]`; as `trained` of strange networks."""
    return trained_with(CASES[name], config, directory)
