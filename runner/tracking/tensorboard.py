"""Tracking with TensorBoard (`tracking=tensorboard`), with event files in the run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runner.tracking.base import Tracker

if TYPE_CHECKING:
    import torch


@dataclass
class TensorBoard(Tracker):
    """A tracker that logs scalars, images and texts to TensorBoard. The HPARAMS tab shows what the user overrode.

    Animations are also written as GIF files to the run directory.

    https://www.tensorflow.org/tensorboard/get_started
    """

    def writes_event_files(self) -> bool:
        return True

    def open(self, directory: Path, first_step: int) -> None:
        from runner.tracking.event_file import EventFile

        self._directory, self._file = directory, EventFile(directory, first_step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        from runner.tracking.event_file import points

        self._file.add(points(values), step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        import torch
        from torch.utils.tensorboard.summary import image

        from runner.tracking.event_file import picture, storage_errors
        from runner.tracking.image_grids import gif, png

        for tag, pixels in images.items():
            if pixels.dtype == torch.uint8 and pixels.shape[:-2] == (3,):  # faster than torch, which computes in floats
                self._file.add(picture(tag, png(pixels), pixels.shape[1], pixels.shape[2]), step)
                continue
            if pixels.ndim == 3:
                self._file.add(image(tag, pixels, dataformats="CHW"), step)
                continue
            encoded = gif(pixels)
            path = self._directory / f"{tag.rpartition('/')[2]}.gif"
            with storage_errors(path):
                path.write_bytes(encoded)
            self._file.add(picture(tag, encoded, pixels.shape[2], pixels.shape[3]), step)

    def texts(self, texts: dict[str, str], step: int) -> None:
        from torch.utils.tensorboard.summary import text

        for tag, content in texts.items():
            self._file.add(text(tag, f"```\n{content}\n```"), step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        from runner.tracking.hparams import row_start

        # `SummaryWriter.add_hparams` would write the row to another run, without the metrics of this one. The row has
        # what was typed: a column for each of the other keys, which have the same value in all runs, would hide it.
        self._file.add(row_start(typed))

    def flush(self) -> None:
        self._file.sync()

    def close(self, done: bool) -> None:
        from runner.tracking.hparams import row_end

        try:
            if done:
                self._file.add(row_end())
        finally:
            self._file.close()
