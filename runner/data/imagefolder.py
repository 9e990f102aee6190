"""A data set of image files in one directory per class, which may be split into training and held-out images."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from runner.config.errors import ConfigError, check, see_comments
from runner.config.limits import Range
from runner.config.overrides import text_override
from runner.data.augment import Augmented
from runner.data.base import Samples
from runner.data.decode import ImageReader
from runner.data.image_files import Fetch, FileSamples
from runner.data.workers import Workers, default_count, start_worker_server
from runner.seeds import derive
from runner.storage.files import walk
from runner.system.secrets import printable

log = logging.getLogger(__name__)


@dataclass
class ImageFolder(Augmented):
    """Images of any size, loaded from files during training; the options are explained in `conf/data/imagefolder.yaml`.

    Any file with the extension of an image that `ImageReader` cannot read counts as unreadable.
    """

    may_change_on_resume = ("root", "on_error", "workers", "prefetch", "timeout", "pin_memory")

    root: str
    size: Annotated[int, Range(least=1, most=4096)] = 224
    holdout: Annotated[float, Range(above=0, most=0.9)] = 0.2
    augment: Literal["none", "flip", "crop"] = "crop"
    crop_area: Annotated[float, Range(above=0, most=1)] = 0.08
    center: Annotated[float, Range(above=0, most=1)] = 0.875
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    on_error: Literal["raise", "skip"] = "raise"
    workers: Annotated[int, Range(least=0, most=256)] | None = None
    prefetch: Annotated[int, Range(least=1, most=64)] = 2
    # Finite: a worker that hangs must not block the run forever.
    timeout: Annotated[float, Range(least=1, most=86400)] = 120
    pin_memory: bool | None = None

    def __post_init__(self) -> None:
        for key, least in (("mean", 0.0), ("std", 1e-6)):
            values = getattr(self, key)
            if len(values) != 3 or not all(least <= value <= 1 for value in values):
                raise ConfigError(key, values, f"it must be three numbers between {least:g} and 1", see_comments(self))

    def load(self) -> tuple[Samples, Samples]:
        splits = self._samples(training_and_held_out)
        return splits["train"](), splits["val"]()

    def splits(self, saved: Mapping[str, Any]) -> dict[str, Callable[[], Samples]]:
        for key in ("mean", "std"):
            here = list(getattr(self, key))
            there = list((saved.get("image") or {key: here})[key])
            remedy = f"'data.{key}=[{','.join(map(str, there))}]'"
            check(here == there, key, here, "the model was trained on images with another one", remedy)
        return self._samples(splits_for_evaluation, saved.get("classes") or [])

    def _samples(
        self, listed: Callable[[Path, float], dict[str, Files]], classes: Sequence[str] = ()
    ) -> dict[str, Callable[[], Samples]]:
        workers = Workers(default_count() if self.workers is None else self.workers, self.timeout, self.prefetch)
        if workers.count:
            start_worker_server()  # starts up while the files are listed
        root = Path(self.root).expanduser()
        splits = listed(root, self.holdout)
        parts = [splits[name] for name in ("train", "val") if name in splits]
        content = cache(partial(fingerprint, root, parts))
        skipped: dict[str, str] | None = {} if self.on_error == "skip" else None
        reader = ImageReader(self.size, self.augment, self.crop_area, self.center)

        def build(name: str) -> FileSamples:
            files = {printable(label): paths for label, paths in splits[name].items()}
            if files.keys() <= set(classes):  # the classes of the model, of which some may have no images here
                files = {label: files.get(label, []) for label in classes}
            return FileSamples(
                paths=[path for paths in files.values() for path in paths],
                targets=[target for target, paths in enumerate(files.values()) for _ in paths],
                class_names=list(files),
                fetch=Fetch(reader, (3, self.size, self.size), self.transform(self.mean) if name == "train" else None),
                mean=tuple(self.mean),
                std=tuple(self.std),
                workers=workers,
                pin_memory=self.pin_memory,
                skipped=skipped,
                center=self.center,
                content=content,
            )

        return {name: partial(build, name) for name in splits}


# ---------------------------------------------------------------------------------------------------------------------
# The images of each class, which are recognized by their file names: no file is opened

EXTENSIONS = (
    ".apng", ".avif", ".avifs", ".bmp", ".bw", ".dds", ".dib", ".gif", ".icb", ".icns", ".ico", ".j2c", ".j2k", ".jfif",
    ".jp2", ".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".pbm", ".pcx", ".pgm", ".png", ".pnm", ".ppm", ".psd",
    ".qoi", ".ras", ".rgb", ".rgba", ".sgi", ".tga", ".tif", ".tiff", ".vda", ".vst", ".webp", ".xbm", ".xpm",
)  # fmt: skip
"""The extensions of the formats in `runner.data.decode.FORMATS`, except `.pfm`, whose pixels are no integers."""
SPLITS = ("train", "val", "valid", "validation", "test")
HELD_OUT = SPLITS[1:]

Files = dict[str, list[str]]
"""The paths of the images of each class; classes and paths are sorted."""


def training_and_held_out(root: Path, holdout: float) -> dict[str, Files]:
    """Return the training images, `train`, and the held-out images, `val`, below `root`, of the same classes.

    `root` contains either `train` and a directory of held-out images (the first that exists of `val`, `valid`,
    `validation` and `test`), both with one directory per class; or one directory per class, of each of which the
    fraction `holdout` is held out. Raises `ConfigError` with the key `root` for anything else.
    """
    present = _split_folders(root)
    splits, names = [*present], [*present.values()]
    if present and (splits[0] != "train" or len(present) == 1):
        why = f"it contains {', '.join(names)}/, but not both train/ and one of {', '.join(HELD_OUT)} with classes"
        remedy = f"add the missing one, or {text_override('data.root', root / names[0])} to split its images"
        raise _refusal(root, why, remedy)
    folder, least = (root / names[0], 1) if present else (root, 2)
    train = _classes(folder, root)
    small = [name for name in _folders(folder) if len(train.get(name, [])) < least]
    if small or len(train) < 2:
        why = f"it has images of {len(train)} classes" + f", and too few of {_first_five(small)}" * bool(small)
        inner = [f", or {text_override('data.root', folder / name)}" for name in train if _folders(folder / name)]
        remedy = f"two classes are needed, each with {least} images or more; remove other folders"
        raise _refusal(folder, why, remedy + "".join(inner) * (len(train) == 1))
    if not present:
        parts = {name: {_relative(path, root).split(os.sep)[1].lower() for path in train[name]} for name in train}
        inside = [name for name in train if {"train"} < parts[name] & {*SPLITS}]
        why = f"the splits are in the class directories: {_first_five(inside)}"
        check(not inside, "root", str(root), why, "put the classes into the splits, as in train/CLASS and val/CLASS")
        return _split(train, root, holdout)
    name = names[1]
    rest = f"; {names[-1]}/ is left for evaluate --split test" * ("test" in splits[2:])
    log.info("%s: training on %s/, evaluating on %s/%s", root, names[0], name, rest)
    held_out = _classes(root / name, root)
    if new := [label for label in held_out if label not in train]:
        why = f"{name}/ has classes that train/ lacks: {_first_five(new)}"
        raise _refusal(root, why, f"add images of them to train/, or remove them from {name}/")
    return {"train": train, "val": {label: held_out.get(label, []) for label in train}}


def splits_for_evaluation(root: Path, holdout: float) -> dict[str, Files]:
    """Return the images of each split below `root`: `all`, and those of `train`, `val` and `test` that there are.

    In contrast to `training_and_held_out`, no split must exist, and a class may have a single image or none. The first
    split is `all`, but if the splits are directories, it is `val`.
    """
    folders = {split: _classes(root / name, root) for split, name in _split_folders(root).items()}
    if not folders:
        classes = _classes(root, root)
        return {"all": classes} | _split(classes, root, holdout)
    held_out = [folders[name] for name in HELD_OUT if name in folders][:1]
    splits = {"val": held_out[0]} if held_out else {}
    splits |= {name: folders[name] for name in ("train", "test") if name in folders}
    everything: Files = {}
    for label, paths in sorted(pair for classes in folders.values() for pair in classes.items()):
        everything[label] = sorted(everything.get(label, []) + paths)
    return splits | {"all": everything}


def fingerprint(root: Path, parts: Iterable[Files]) -> str:
    """Return the SHA-256 of the sorted relative paths, in which the classes are, and of the sizes of the files."""
    lines = []
    for path in [path for files in parts for paths in files.values() for path in paths]:
        try:
            size = os.stat(path).st_size
        except OSError:  # deleted in the meantime: it cannot be read
            size = -1
        lines.append(os.fsencode(f"{_relative(path, root)}\t{size}\n"))
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def _relative(path: str, root: Path) -> str:
    return path[len(str(root / "x")) - 1 :]


def _split_folders(root: Path) -> dict[str, str]:
    """Return the name of the directory of each split that there is, in the order of `SPLITS`; `Training` is `train`."""
    folders = sorted(_folders(root), key=lambda name: name in SPLITS)
    names = {name.lower().removesuffix("ing"): name for name in folders}
    return {split: names[split] for split in SPLITS if split in names and _folders(root / names[split])}


def _split(classes: Files, root: Path, holdout: float) -> dict[str, Files]:
    """Hold out the images of each class whose paths have the smallest hashes, which are the same in every run."""
    train, held_out = {}, {}
    for name, paths in classes.items():
        order = sorted(paths, key=lambda path: derive(0, "holdout", _relative(path, root).replace(os.sep, "/")))
        count = min(max(1, round(holdout * len(paths))), len(paths) - 1)
        held_out[name], train[name] = sorted(order[:count]), sorted(order[count:])
    return {"train": train, "val": held_out}


def _classes(folder: Path, root: Path) -> Files:
    """Return the images of each class that has any: a subdirectory of `folder`, with images at any depth."""
    names, ignored, classes = _folders(folder), Counter[str](), {}
    for name in {entry.name for entry in os.scandir(folder)}.difference(names):
        kind = _kind(name)
        ignored[f"{kind} in no class directory" if kind in EXTENSIONS else kind] += 1
    for name in names:
        classes[name], others = images_below(folder / name, "root")
        ignored += others
    if total := ignored.total():
        kinds = ", ".join(f"{count} {kind}" for kind, count in ignored.most_common(10))
        part = f"{folder.name}/: " if folder != root else ""
        log.info("%s: %signored %d files and folders (%s)", root, part, total, kinds)
    if not any(classes.values()):
        why = f"it contains no class directories with images ({' '.join(EXTENSIONS)})"
        raise _refusal(folder, why, "put the images of each class into a separate directory")
    return {name: paths for name, paths in classes.items() if paths}


def images_below(folder: Path, key: str) -> tuple[list[str], Counter[str]]:
    """Return the sorted paths of the images in `folder`, at any depth, and the number of other entries by their kind.

    Hidden files and directories are left out, and links to directories, which may lead to a parent directory. Raises
    `ConfigError` with `key` if a directory cannot be read.
    """
    images: list[str] = []
    ignored = Counter[str]()
    for where, folders, names in walk(folder, onerror=partial(_cannot_list, key)):
        ignored["hidden"] += sum(map(_is_hidden, folders))
        folders[:] = [name for name in folders if not _is_hidden(name)]
        ignored["linked folders"] += sum(os.path.islink(os.path.join(where, name)) for name in folders)
        for name in names:
            kind = _kind(name)
            if kind in EXTENSIONS:
                images.append(os.path.join(where, name))
            else:
                ignored[kind] += 1
    return sorted(images), +ignored


def _folders(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not _is_hidden(entry.name))
    except OSError as error:
        _cannot_list("root", error)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # which macOS puts into archives


def _kind(name: str) -> str:
    return "hidden" if _is_hidden(name) else os.path.splitext(name)[1].lower() or "without extension"


def _cannot_list(key: str, error: OSError) -> NoReturn:
    why, remedy = f"it cannot be listed from {Path.cwd()}: {error.strerror}", "name a directory that you may read"
    raise ConfigError(key, error.filename, why, remedy) from None


def _refusal(path: Path, why: str, remedy: str) -> ConfigError:
    return ConfigError("root", str(path), why, remedy)


def _first_five(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
