"""A language model of characters: a data set, a network and a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.config.errors import check
from runner.config.limits import PositiveInt, Range
from runner.data.base import Data, Samples
from runner.data.memory import ArraySamples
from runner.model.base import Model
from runner.tracking.metrics import MetricSums
from runner.workloads.supervised import DataWorkload


class Text(ArraySamples):
    """Pieces of a text: the target of each character is the next one. Inputs and targets are int64 [n, length]."""

    def __init__(self, codes: torch.Tensor, length: int, alphabet: list[str]):
        super().__init__(codes[:-1].unfold(0, length, length), codes[1:].unfold(0, length, length))
        self.alphabet = alphabet


@dataclass
class TextFile(Data):
    """The characters of a text file.

    Args:
        file: a text file, in UTF-8.
        length: number of characters in a sample.
        holdout: the share of the text, taken from its end, that is kept for evaluation.
    """

    file: str
    length: PositiveInt = 64
    holdout: Annotated[float, Range(above=0, most=0.9)] = 0.1

    def load(self) -> tuple[Samples, Samples]:
        path = Path(self.file).expanduser()
        check(path.is_file(), "file", self.file, "there is no such file", "data.file=PATH of a text file")
        text = path.read_text(encoding="utf-8")
        alphabet = sorted(set(text))
        codes = torch.tensor([alphabet.index(character) for character in text])
        cut = round(len(codes) * (1 - self.holdout))
        least = min(cut, len(codes) - cut)
        remedy = "a longer text, less data.length, or another data.holdout"
        check(least > self.length, "length", self.length, f"a part of the text has {least} characters", remedy)
        return Text(codes[:cut], self.length, alphabet), Text(codes[cut:], self.length, alphabet)


@dataclass
class CharacterTransformer(Model):
    """A causal transformer (Vaswani et al., 2017), with normalization before attention, and without dropout.

    Args:
        width: size of the representation of a character.
        heads: number of attention heads.
        layers: number of layers.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2

    num_dims: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        why = f"it does not divide into {self.heads} heads"
        check(self.width % self.heads == 0, "width", self.width, why, "a multiple of model.heads")

    def network(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return Transformer(shape[0], num_classes, self.width, self.heads, self.layers)


class Transformer(nn.Sequential):
    """Maps characters, int64 [n, length], to the logits of the next ones, [n, length, num_characters]."""

    def __init__(self, length: int, num_characters: int, width: int, heads: int, layers: int):
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_characters))
        super().__init__(Embedding(length, num_characters, width), *(Layer(width, heads) for _ in range(layers)), head)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the name and module of each block; the network can be cut between any two consecutive blocks."""
        return list(self.named_children())


class Embedding(nn.Module):
    """The sum of the representations of a character and of its position."""

    def __init__(self, length: int, num_characters: int, width: int):
        super().__init__()
        self.character = nn.Embedding(num_characters, width)
        self.position = nn.Parameter(torch.randn(length, width) / 10)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.character(codes) + self.position[: codes.shape[1]]


class Layer(nn.TransformerEncoderLayer):
    """A layer in which each position attends to itself and to those before it."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, src: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], src.device, src.dtype)
        return super().forward(src, mask, is_causal=True)


@dataclass
class Characters(DataWorkload[Text]):
    """Predict the next character; the loss is the mean cross-entropy of a character.

    Args:
        model: a network for sequences of characters.
        data: a text.
    """

    train_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    best: ClassVar[tuple[str, str]] = ("loss", "min")

    def usable(self, samples: Samples) -> Text:
        check(isinstance(samples, Text), "data", type(self.data).__name__, "it is no text", "use data=characters")
        assert isinstance(samples, Text)
        return samples

    def describe(self) -> dict[str, str]:
        sizes = f"{self.train.inputs.numel():,} training and {self.held_out.inputs.numel():,} held-out characters"
        return {"data": f"{sizes}, {len(self.train.alphabet)} different ones"}

    def input_shape(self) -> None:
        return None  # --summary would pass numbers that are no characters

    def build_model(self) -> nn.Module:
        return self.model.build(self.train.shape, len(self.train.alphabet))

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        sums = {"loss": torch.zeros((), device=device), "count": torch.zeros((), device=device)}
        for batch in self.held_out.in_order(self.eval_batch_size, shard, device):
            sums["loss"] += self.criterion(infer(batch.inputs).float(), batch.targets) * len(batch.targets)
            sums["count"] += len(batch.targets)
        return sums

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        return {"loss": float(sums["loss"] / sums["count"])}
