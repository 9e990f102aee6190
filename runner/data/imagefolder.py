"""Any folder of images: a sub-folder a class."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from runner.config.errors import check, check_choice, check_range
from runner.data.base import Data, Samples
from runner.data.files import FileSamples, Unreadable
from runner.data.folders import Files, training_and_held_out
from runner.data.images import ImageReader
from runner.data.workers import Workers, default_count, start_server


@dataclass
class ImageFolder(Data):
    """Images of any size and format, read as the batches come.

    Args:
        root: a folder that holds `train` and one of `val`, `valid`, `validation` and `test`, with a folder a class in
            each; or the class folders themselves, of whose images a share is then held out.
        size: of the square that a network is shown, in pixels.
        holdout: share of each class's images that is held out, the same in every run, where no folder says which.
        augment: of training images: `crop` a random part and mirror half of them, only `flip`, or `none`.
        crop_area: the smallest share of an image that a random part shows.
        centre: side of the central square that is shown otherwise, as a share of the image's shorter side.
        mean: of red, green and blue, in units of [0, 1]; inputs are shifted by it.
        std: of red, green and blue; inputs are divided by it.
        on_error: what to do about a file that cannot be read: `raise` ends the run, `skip` goes on without it.
        workers: processes that read; 0: the run's own; null: one a core but one, at most eight.
        prefetch: batches that each worker reads ahead.
        timeout: seconds without a batch after which the run ends with an error.
        pin_memory: batches in page-locked memory, copied to a CUDA device beside its work; null: where there is one.
    """

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("on_error", "workers", "prefetch", "timeout", "pin_memory")
    """Options that change how the work is done, not what is computed: they may differ on a resume."""

    root: str
    size: int = 224
    holdout: float = 0.2
    augment: str = "crop"
    crop_area: float = 0.08
    centre: float = 0.875
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    on_error: str = "raise"
    workers: int | None = None
    prefetch: int = 2
    timeout: float = 120
    pin_memory: bool | None = None

    def __post_init__(self) -> None:
        check_range(self, "size", least=1, most=4096)
        check_range(self, "holdout", above=0, most=0.9)
        check_choice(self, "augment", ("none", "flip", "crop"))
        check_range(self, "crop_area", above=0, most=1)
        check_range(self, "centre", above=0, most=1)
        for key, least in (("mean", 0.0), ("std", 1e-6)):
            values = getattr(self, key)
            ok = len(values) == 3 and all(least <= value <= 1 for value in values)
            check(ok, key, values, f"it must be three numbers from {least:g} to 1", "one each for red, green and blue")
        check_choice(self, "on_error", ("raise", "skip"))
        check_range(self, "workers", least=0, most=256)
        check_range(self, "prefetch", least=1, most=64)
        check_range(self, "timeout", least=1, most=86400)  # finite: a worker that hangs must not hang the run

    def load(self) -> tuple[Samples, Samples]:
        workers = Workers(default_count() if self.workers is None else self.workers, self.timeout, self.prefetch)
        if workers.count:
            start_server()  # it gets ready while we look for the files
        train, held_out = training_and_held_out(Path(self.root).expanduser(), self.holdout)
        unreadable = Unreadable(self.on_error == "skip")
        return self._samples(train, workers, unreadable), self._samples(held_out, workers, unreadable)

    def _samples(self, classes: Files, workers: Workers, unreadable: Unreadable) -> FileSamples:
        names = list(classes)
        return FileSamples(
            paths=[path for paths in classes.values() for path in paths],
            targets=[target for target, name in enumerate(names) for _ in classes[name]],
            class_names=names,
            shape=(3, self.size, self.size),
            read=ImageReader(self.size, self.augment, self.crop_area, self.centre),
            mean=tuple(self.mean),
            std=tuple(self.std),
            workers=workers,
            pin_memory=self.pin_memory,
            unreadable=unreadable,
        )
