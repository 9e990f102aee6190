"""Tracking with TensorBoard (`tracking=tensorboard`), with event files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runner.storage.run_directory import storage_errors
from runner.tracking.base import Tracker

if TYPE_CHECKING:
    import torch


@dataclass
class TensorBoard(Tracker):
    """A tracker that logs scalars, images and texts to TensorBoard. The HPARAMS tab shows what the user overrode.

    Animations are also written as GIF files to the run directory.

    https://www.tensorflow.org/tensorboard/get_started
    """

    def open(self, directory: Path, first_step: int) -> None:
        from runner.tracking.event_file import EventFile

        self._directory, self._file = directory, EventFile(directory, first_step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        from runner.tracking.event_file import points

        self._file.add(points(values), step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        from runner.tracking.event_file import picture
        from runner.tracking.image_grids import gif, png

        for tag, pixels in images.items():
            encoded = png(pixels) if pixels.ndim == 3 else gif(pixels)
            if pixels.ndim == 4:
                path = self._directory / f"{tag.rpartition('/')[2]}.gif"
                with storage_errors(path):
                    path.write_bytes(encoded)
            self._file.add(picture(tag, encoded, *pixels.shape[-2:]), step)

    def texts(self, texts: dict[str, str], step: int) -> None:
        from torch.utils.tensorboard.summary import text

        for tag, content in texts.items():
            self._file.add(text(tag, f"```\n{content}\n```"), step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # `SummaryWriter.add_hparams` would write the row to another run, without the metrics of this one. The row has
        # what was typed: a column for each of the other keys, which have the same value in all runs, would hide it.
        self._file.add(hparams(hparam_values(typed), {})[1])
        self._file.remove_earlier()

    def flush(self) -> None:
        self._file.sync()

    def close(self, status: str) -> None:
        from torch.utils.tensorboard.summary import hparams

        try:
            if status == "done":
                self._file.add(hparams({}, {})[2])  # marks the row of the HPARAMS tab as successful
        finally:
            self._file.close()


def hparam_values(values: Mapping[str, float | str | bool]) -> dict[str, float | str]:
    """Return values for torch's `hparams`: truth values as text, which it would log as numbers."""
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
