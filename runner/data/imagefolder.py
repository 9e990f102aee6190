"""A data set of image files in one directory per class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from runner.config.errors import check, check_choice, check_range
from runner.data.augment import NO_AUGMENT, POLICIES, Augment
from runner.data.base import Data, Samples
from runner.data.class_folders import Files, fingerprint, splits_for_evaluation, training_and_held_out
from runner.data.decode import ImageReader
from runner.data.image_files import Fetch, FileSamples, Unreadable
from runner.data.workers import Workers, default_count, start_worker_server
from runner.system.utf8 import printable


@dataclass
class ImageFolder(Data):
    """Images of any size, loaded from files during training; the options are explained in `conf/data/imagefolder.yaml`.

    A file is BMP, GIF, JPEG, PNG, PPM, TIFF or WebP, and a regular file, or a link to one, of at most 256 MiB and
    89,478,485 pixels; any other file with the extension of an image counts as unreadable.
    """

    may_change_on_resume: ClassVar[tuple[str, ...]] = (
        *("root", "on_error", "workers", "prefetch", "timeout", "pin_memory"),
    )
    """Options that may differ on resume: they do not affect the samples, or the fingerprint shows that they do."""

    root: str
    size: int = 224
    holdout: float = 0.2
    augment: str = "crop"
    crop_area: float = 0.08
    auto_augment: str = "none"
    random_erase: float = 0.0
    center: float = 0.875
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
        check_choice(self, "auto_augment", POLICIES)
        check_range(self, "random_erase", least=0, most=1)
        check_range(self, "center", above=0, most=1)
        for key, least in (("mean", 0.0), ("std", 1e-6)):
            values = getattr(self, key)
            ok = len(values) == 3 and all(least <= value <= 1 for value in values)
            why = f"it must be three numbers between {least:g} and 1"
            check(ok, key, values, why, "give one each for red, green and blue")
        check_choice(self, "on_error", ("raise", "skip"))
        check_range(self, "workers", least=0, most=256)
        check_range(self, "prefetch", least=1, most=64)
        check_range(self, "timeout", least=1, most=86400)  # finite: a worker that hangs must not block the run forever

    def load(self) -> tuple[Samples, Samples]:
        workers = self._workers()
        train, held_out = training_and_held_out(self._directory, self.holdout)
        build = self._builder(workers, train, held_out)
        return build(train, augment=self._augment), build(held_out)

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        for key in ("mean", "std"):
            here = list(getattr(self, key))
            there = list((saved.get("image") or {key: here})[key])
            remedy = f"data.{key}=[{','.join(map(str, there))}]"
            check(here == there, key, here, "the model was trained on images with another one", remedy)
        workers = self._workers()
        splits = splits_for_evaluation(self._directory, self.holdout)
        build = self._builder(workers, *(splits[name] for name in ("train", "val") if name in splits))
        classes, augment = saved.get("classes") or [], {"train": self._augment}
        return {
            name: partial(build, _with_all(classes, files), augment=augment.get(name, NO_AUGMENT))
            for name, files in splits.items()
        }

    @property
    def _augment(self) -> Augment:
        return Augment(self.auto_augment, self.random_erase, tuple(self.mean))

    @property
    def _directory(self) -> Path:
        return Path(self.root).expanduser()

    def _workers(self) -> Workers:
        workers = Workers(default_count() if self.workers is None else self.workers, self.timeout, self.prefetch)
        if workers.count:
            start_worker_server()  # starts up while the files are listed
        return workers

    def _builder(self, workers: Workers, *parts: Files) -> Callable[..., FileSamples]:
        """Return a function that makes samples of files; `parts` are all files of the data set."""
        unreadable = Unreadable(self.on_error == "skip")
        content = cache(partial(fingerprint, self._directory, parts))

        def build(classes: Files, augment: Augment = NO_AUGMENT) -> FileSamples:
            reader = ImageReader(self.size, self.augment, self.crop_area, self.center)
            return FileSamples(
                paths=[path for paths in classes.values() for path in paths],
                targets=[target for target, paths in enumerate(classes.values()) for _ in paths],
                class_names=[printable(name) for name in classes],
                fetch=Fetch(reader, (3, self.size, self.size), augment),
                mean=tuple(self.mean),
                std=tuple(self.std),
                workers=workers,
                pin_memory=self.pin_memory,
                unreadable=unreadable,
                center=self.center,
                content=content,
            )

        return build


def _with_all(classes: Sequence[str], files: Files) -> Files:
    """Return the files of all `classes`, in their order; `files` itself if it has others."""
    found = {printable(name): paths for name, paths in files.items()}
    return {name: found.get(name, []) for name in classes} if found.keys() <= set(classes) else files
