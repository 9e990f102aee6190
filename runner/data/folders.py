"""Which images lie in a folder, of which class, and which of them are held out. Only names are looked at here."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import NoReturn

from runner.config.errors import ABSENT, ConfigError, check
from runner.seeds import derive

log = logging.getLogger(__name__)

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
HELD_OUT = ("val", "valid", "validation", "test")

Files = dict[str, list[str]]
"""The paths of each class's images; classes and paths sorted."""


def training_and_held_out(root: Path, holdout: float) -> tuple[Files, Files]:
    """The images below `root`.

    Args:
        root: holds `train` and one of `HELD_OUT`, with a folder a class in each; or the class folders themselves.
        holdout: the share of each class that is held out in the second case.

    Raises:
        ConfigError: under the key `root`, when there is no such layout.
    """
    check(root.exists(), "root", str(root), "there is no such folder", "name a folder with a sub-folder a class")
    check(root.is_dir(), "root", str(root), "it is a file", "name a folder with a sub-folder a class")
    folders = _folders(root)
    name = next((name for name in HELD_OUT if name in folders), None)
    if "train" in folders and name is not None:
        log.info("%s: training on train/, holding out %s/", root, name)
        return _same_classes(_classes(root / "train"), _classes(root / name), root, name)
    half = [part for part in ("train", *HELD_OUT) if part in folders and _folders(root / part)]
    check(
        not half,
        "root",
        str(root),
        f"it has {', '.join(half)}/ with class folders, but not both train/ and one of {', '.join(HELD_OUT)}",
        f"add the other, or name {root / (half or ['train'])[0]}, and data.holdout of it is held out",
    )
    return _divided(_classes(root), root, holdout)


def _same_classes(train: Files, held_out: Files, root: Path, name: str) -> tuple[Files, Files]:
    for more, there, less, lacking in ((train, "train", held_out, name), (held_out, name, train, "train")):
        lone = [c for c in more if c not in less]
        why = f"{there}/ has classes that {lacking}/ lacks: {_some(lone)}"
        check(not lone, "root", str(root), why, "both must have the same class folders")
    return train, held_out


def _divided(classes: Files, root: Path, holdout: float) -> tuple[Files, Files]:
    """A share of each class held out: those with the smallest hashes, so that it is the same in every run."""
    small = [name for name, paths in classes.items() if len(paths) < 2]
    why = f"these classes have a single image, and one must be held out: {_some(small)}"
    check(not small, "root", str(root), why, "add images to them, or remove their folders")
    train, held_out = {}, {}
    for name, paths in classes.items():
        order = sorted(paths, key=lambda path: derive(0, "holdout", os.path.relpath(path, root).replace(os.sep, "/")))
        count = min(max(1, round(holdout * len(paths))), len(paths) - 1)
        held_out[name], train[name] = sorted(order[:count]), sorted(order[count:])
    return train, held_out


def _classes(folder: Path) -> Files:
    """The images in each class folder of `folder`, at any depth."""
    names = _folders(folder)
    why = f"{folder} holds {len(names)} class folders, and there is nothing to tell apart"
    check(len(names) > 1, "root", str(folder), why, "put the images of each class into a folder of their own")
    others: Counter[str] = Counter()
    classes = {name: _images(folder / name, others) for name in names}
    empty = [name for name, paths in classes.items() if not paths]
    why = f"no image in {_some(empty)}; images end in {' '.join(EXTENSIONS)}"
    check(not empty, "root", str(folder), why, "put images into every class folder, or remove it")
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(10))
        log.info("%s: left out %d files that are no images by their names (%s)", folder, others.total(), kinds)
    return classes


def _folders(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        _cannot_read(error)


def _images(path: Path, others: Counter[str]) -> list[str]:
    """The images below `path`; other files are counted by extension, hidden files and folders as such."""
    images: list[str] = []
    seen: set[str] = set()
    for where, folders, names in os.walk(path, followlinks=True, onerror=_cannot_read):
        real = os.path.realpath(where)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        if real in seen:  # a link that leads back
            continue
        seen.add(real)
        for name in names:
            extension = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                others["hidden"] += 1
            elif extension in EXTENSIONS:
                images.append(os.path.join(where, name))
            else:
                others[extension or "without extension"] += 1
    return sorted(images)


def _cannot_read(error: OSError) -> NoReturn:
    why = f"{error.filename} cannot be read: {error.strerror}"
    raise ConfigError("root", ABSENT, why, "see that this user may list it") from None


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
