"""Predicts the classes of image files with a trained model. The files are read as in the evaluation of its run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from runner.config.errors import check
from runner.data.decode import ImageInput
from runner.data.imagefolder import EXTENSIONS, images_below
from runner.storage.files import check_readable
from runner.system.secrets import printable

_BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """The prediction for one file. If it could not be read, it has only an `error`, the reason."""

    file: str
    label: str = ""
    """The name of the most probable class."""
    probability: float = 0.0
    error: str = ""
    top: tuple[tuple[str, float], ...] = ()
    """The most probable classes, as many as were asked for, and their probabilities; the first is that above."""


def image_files(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return `paths`, with each directory replaced by the sorted paths of its images at any depth but hidden ones."""
    found: list[str] = []
    for path in map(Path, paths):
        text, suffixes = printable(str(path)), " ".join(EXTENSIONS)
        check_readable("FILES", path)
        check(path.exists(), "FILES", text, "there is no such file or directory", "name images, or a directory of them")
        if not path.is_dir():
            found.append(str(path))
            continue
        images, _ = images_below(path, "FILES")
        check(bool(images), "FILES", text, "there are no images in this directory", f"name one with {suffixes}")
        found += images
    check(bool(found), "FILES", list(paths), "there is nothing to predict", "name images, or a directory of them")
    return found


def predict(
    model: torch.nn.Module, inputs: ImageInput, classes: Sequence[str], files: Sequence[str], top: int = 1
) -> Iterator[Prediction]:
    """Yield the prediction of `model`, a classifier on the CPU, for each file, in the order of the files.

    `top` is the number of classes in `Prediction.top`, at most.
    """
    for start in range(0, len(files), _BATCH):
        batch = files[start : start + _BATCH]
        images: dict[str, torch.Tensor] = {}
        found: dict[str, Prediction] = {}
        for file in batch:
            try:
                images[file] = inputs.read(file)
            except Exception as error:  # decoders may raise anything for a damaged file
                found[file] = Prediction(file, error=printable(f"{type(error).__name__}: {error}"))
        if images:
            with torch.inference_mode():
                outputs = model(inputs.normalized(torch.stack([*images.values()])))
                values, indices = outputs.softmax(1).topk(min(top, len(classes)))
            for file, probabilities, labels in zip(images, values.tolist(), indices.tolist(), strict=True):
                best = tuple((printable(classes[int(i)]), p) for i, p in zip(labels, probabilities, strict=True))
                found[file] = Prediction(file, *best[0], top=best)
        yield from (found[file] for file in batch)
