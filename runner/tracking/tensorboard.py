"""`tracking=tensorboard`: events in the run's own directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runner.tracking.base import Tracker

if TYPE_CHECKING:
    import torch


@dataclass
class TensorBoard(Tracker):
    """Scalars, images, texts and a row in the HPARAMS tab, whose metrics are the scalars; films as GIFs too.

    https://www.tensorflow.org/tensorboard/get_started
    """

    def open(self, directory: Path, first_step: int) -> None:
        from runner.tracking.event_file import EventFile  # imported here: TensorBoard's protocol buffers need torch

        self._directory, self._file = directory, EventFile(directory, first_step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        from runner.tracking.event_file import points

        self._file.add(points(values), step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        from torch.utils.tensorboard.summary import image

        from runner.tracking.event_file import animation
        from runner.tracking.images import gif

        for tag, picture in images.items():
            if picture.ndim == 3:
                self._file.add(image(tag, picture, dataformats="CHW"), step)
                continue
            film = gif(picture)
            (self._directory / f"{tag.rpartition('/')[2]}.gif").write_bytes(film)
            self._file.add(animation(tag, film, picture.shape[2], picture.shape[3]), step)

    def texts(self, texts: dict[str, str], step: int) -> None:
        from torch.utils.tensorboard.summary import text

        for tag, content in texts.items():
            self._file.add(text(tag, f"```\n{content}\n```"), step)

    def hyperparameters(self, values: dict[str, float | str | bool]) -> None:
        from runner.tracking.event_file import row_start

        # In the run's own file: `SummaryWriter.add_hparams` makes a run of its own, in which the metrics do not show.
        self._file.add(row_start(values))

    def flush(self) -> None:
        self._file.sync()

    def close(self, done: bool) -> None:
        from runner.tracking.event_file import row_end

        if done:
            self._file.add(row_end())
        self._file.close()
