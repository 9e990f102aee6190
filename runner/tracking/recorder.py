"""What a run leaves to look at: TensorBoard events, and the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard.summary import image, text

from runner.tracking.images import gif
from runner.tracking.tensorboard import EventFile, animation, points, row_end, row_start


class Recorder:
    """TensorBoard's events of one session, in the run's own directory; writes nothing off rank 0.

    Args:
        directory: the run's.
        after_step: the step that was resumed from; what was logged of later ones is purged, so that none shows twice.
    """

    def __init__(self, directory: Path, after_step: int, visible: bool = True):
        self._first_step = after_step + 1
        self._directory = directory
        self._file = EventFile(directory, self._first_step) if visible else None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def scalars(self, values: dict[str, Any], step: int) -> None:
        """Log numbers by tag; x is the number of optimizer steps."""
        if self._file is not None:
            self._file.add(points({tag: float(value) for tag, value in values.items()}), step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        """Log RGB images, uint8 [3, height, width], by tag; a film, [frames, 3, height, width], is also a GIF."""
        if self._file is not None:
            for tag, picture in images.items():
                if picture.ndim == 3:
                    self._file.add(image(tag, picture, dataformats="CHW"), step)
                    continue
                film = gif(picture)
                (self._directory / f"{tag.rpartition('/')[2]}.gif").write_bytes(film)
                self._file.add(animation(tag, film, picture.shape[2], picture.shape[3]), step)

    def texts(self, texts: dict[str, str]) -> None:
        """Log preformatted texts by tag; x is the session's first step, from which on they hold."""
        if self._file is not None:
            for tag, content in texts.items():
                self._file.add(text(tag, f"```\n{content}\n```"), self._first_step)

    def open_row(self, config: dict[str, Any]) -> None:
        """This run's row in the HPARAMS tab; its metrics are what is logged as scalars.

        In the run's own file: `SummaryWriter.add_hparams` makes a run of its own, whose metrics do not show.
        """
        if self._file is not None:
            self._file.add(row_start({key: value for key, value in flatten(config).items() if value is not None}))

    def close_row(self) -> None:
        """Say in the HPARAMS tab that the run came to its end."""
        if self._file is not None:
            self._file.add(row_end())

    def sync(self) -> None:
        """Everything logged so far is on the disk: before a checkpoint, whose resume does not log it again."""
        if self._file is not None:
            self._file.sync()


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested config by dotted key; lists as text, and of a component's class its bare name."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{key}.")
        elif key == "_target_":
            leaves[prefix.rstrip(".")] = value.rpartition(".")[2]
        else:
            leaves[prefix + key] = value if isinstance(value, int | float | str | None) else str(value)
    return leaves
