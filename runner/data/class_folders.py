"""Find the images of each class in a directory, and split them into training and held-out images.

Images are recognized by their file names; no file is opened.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

from runner.config.errors import ABSENT, ConfigError, check
from runner.config.overrides import text_override
from runner.data.folder_cache import Listing, Stamp, cached, stamp
from runner.seeds import derive

log = logging.getLogger(__name__)

EXTENSIONS = (
    ".apng", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif",
    ".tiff", ".webp",
)  # fmt: skip
"""The extensions of the formats in `runner.data.decode.FORMATS`, except `.pfm`, whose pixels are no integers."""
MOST_LEVELS = 50
"""The maximum depth of nested directories: before Python 3.12, `os.walk` fails on a thousand nested directories."""
HELD_OUT = ("val", "valid", "validation", "test")

Files = dict[str, list[str]]
"""The paths of the images of each class; classes and paths are sorted."""


def training_and_held_out(root: Path, holdout: float) -> tuple[Files, Files]:
    """Return the training images and the held-out images below `root`, as dicts from class to sorted paths.

    Args:
        root: a directory with one of two layouts. In the first, it contains the directory `train` and a directory of
            held-out images (the first that exists of `val`, `valid`, `validation` and `test`), both with one directory
            per class. In the second, it contains one directory per class.
        holdout: fraction of the images of each class to hold out; used only for the second layout.

    Raises:
        ConfigError: with the key `root`, if `root` has neither of these layouts, if directories cannot be listed or are
            nested too deeply, or if a class has too few images.
    """
    _check_directory(root)
    real = os.path.realpath(root)  # the cache does not depend on how the directory is named
    train, held_out, notes = cached([real, holdout], partial(_listed, root, holdout))
    for note in notes:
        log.info("%s: %s", root, note)
    return _joined(root, train), _joined(root, held_out)


def splits_for_evaluation(root: Path, holdout: float) -> dict[str, Files]:
    """Return the images of each split below `root`: `all`, and those of `train`, `val` and `test` that there are.

    In contrast to `training_and_held_out`, no split must exist, a class may have a single image or none, and there may
    be only one class. The first split is `all`, but if the splits are directories, it is `val`: the first that exists
    of `val`, `valid`, `validation` and `test`.

    Raises:
        ConfigError: as in `training_and_held_out`.
    """
    _check_directory(root)
    visited = _Visited(root)
    folders = {name: _held_out_classes(root / name, visited) for name in _split_folders(root, visited)}
    if folders:
        held_out = [folders[name] for name in HELD_OUT if name in folders][:1]
        everything: dict[str, set[str]] = {}
        for label, paths in [pair for classes in folders.values() for pair in classes.items()]:
            everything.setdefault(label, set()).update(paths)
        splits = {name: folders[name] for name in ("train", "test") if name in folders}
        splits = {"val": held_out[0], **splits} if held_out else splits
        splits["all"] = {label: sorted(everything[label]) for label in sorted(everything)}
    else:
        classes = _held_out_classes(root, visited)
        train, held_out = _split(classes, root, holdout)
        splits = {"all": classes, "train": train, "val": held_out}
    for note in visited.notes:
        log.info("%s: %s", root, note)
    return splits


def fingerprint(root: Path, parts: Iterable[Files]) -> str:
    """Return the SHA-256 of the sorted relative paths, in which the classes are, and of the sizes of the files."""
    start, lines = len(str(root / "x")) - 1, []
    for path in [path for files in parts for paths in files.values() for path in paths]:
        try:
            size = os.stat(path).st_size
        except OSError:  # deleted in the meantime: it cannot be read
            size = -1
        lines.append(os.fsencode(f"{path[start:]}\t{size}\n"))
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def _check_directory(root: Path) -> None:
    remedy = "give a directory that contains one directory of images per class"
    where = "" if root.is_absolute() else f" in {Path.cwd()}"
    check(os.path.exists(root), "root", str(root), f"there is no such directory{where}", remedy)
    check(root.is_dir(), "root", str(root), "it is a file", remedy)


def _joined(root: Path, classes: Files) -> Files:
    prefix = str(root / "x")[:-1]
    return {name: [prefix + path for path in paths] for name, paths in classes.items()}


class _Visited:
    """The directories that have been listed, and notes about them for the log.

    Args:
        root: the directory of the data set.
    """

    def __init__(self, root: Path):
        self.root, self.notes, self.num_files = root, list[str](), 0
        self.directories: dict[str, Stamp] | None = {}

    def add(self, path: str) -> None:
        """Add a directory that is about to be listed."""
        if self.directories is not None:
            self.directories.setdefault(os.path.realpath(path), stamp(path))

    def check_link(self, path: str) -> None:
        """Prevent caching of the listing if `path` is a symbolic link, because its target can change."""
        if os.path.islink(path):
            self.directories = None

    def relative(self, classes: Files) -> Files:
        """Return `classes` with paths relative to the root."""
        start = len(str(self.root / "x")) - 1
        return {name: [path[start:] for path in paths] for name, paths in classes.items()}


def _listed(root: Path, holdout: float) -> Listing:
    """Return a new listing of the training images and the held-out images below `root`.

    `folder_cache.cached` calls this function if there is no valid cached listing. The values of the listing are the
    training images, the held-out images and a list of notes for the log. Paths are relative to `root`.
    """
    visited = _Visited(root)
    train, held_out = _found(root, holdout, visited)
    values = [visited.relative(train), visited.relative(held_out), visited.notes]
    return Listing(values, visited.directories, visited.num_files)


def _found(root: Path, holdout: float, visited: _Visited) -> tuple[Files, Files]:
    folders = _folders(root, visited)
    name = next((name for name in HELD_OUT if name in folders), None)
    if "train" in folders and name is not None:
        rest = "; test/ is left for evaluate --split test" * ("test" in folders and name != "test")
        visited.notes.append(f"training on train/, evaluating on {name}/{rest}")
        train, held_out = _training_classes(root / "train", visited), _held_out_classes(root / name, visited)
        new, missing = ([c for c in some if c not in others] for some, others in ((held_out, train), (train, held_out)))
        why = f"{name}/ has classes that train/ lacks: {_first_five(new)}"
        check(not new, "root", str(root), why, f"add images of them to train/, or remove them from {name}/")
        if missing:
            visited.notes.append(f"{name}/ has no images of {_first_five(missing)}")
        return train, {label: held_out.get(label, []) for label in train}
    present = _split_folders(root, visited)
    check(
        not present,
        "root",
        str(root),
        f"it contains {', '.join(present)}/, but not both train/ and one of {', '.join(HELD_OUT)}",
        f"add the missing one, or {text_override('data.root', root / (present or ['train'])[0])} to split its images",
    )
    classes = _training_classes(root, visited)
    small = [name for name, paths in classes.items() if len(paths) < 2]
    why = f"these classes have only one image, but one must be held out: {_first_five(small)}"
    check(not small, "root", str(root), why, "add images to these classes, or remove their directories")
    return _split(classes, root, holdout)


def _split_folders(root: Path, visited: _Visited) -> list[str]:
    folders = _folders(root, visited)
    return [name for name in ("train", *HELD_OUT) if name in folders and _folders(root / name, visited)]


def _split(classes: Files, root: Path, holdout: float) -> tuple[Files, Files]:
    """Split the images of each class into training and held-out images, and return both.

    The images whose paths have the smallest hashes are held out, so that every run holds out the same images.
    """
    train, held_out = {}, {}
    start = len(str(root / "x")) - 1
    for name, paths in classes.items():
        order = sorted(paths, key=lambda path: derive(0, "holdout", path[start:].replace(os.sep, "/")))
        count = min(max(1, round(holdout * len(paths))), len(paths) - 1)
        held_out[name], train[name] = sorted(order[:count]), sorted(order[count:])
    return train, held_out


def _training_classes(folder: Path, visited: _Visited) -> Files:
    """Return the images of each class; there must be two classes, and images of each."""
    classes = _classes(folder, visited)
    why = f"{folder} contains {len(classes)} class directories, and classification needs at least two"
    check(len(classes) > 1, "root", str(folder), why, "put the images of each class into a separate directory")
    empty = [name for name, paths in classes.items() if not paths]
    why = f"these class directories contain no images ({' '.join(EXTENSIONS)}): {_first_five(empty)}"
    check(not empty, "root", str(folder), why, "add images to these directories, or remove them")
    return classes


def _held_out_classes(folder: Path, visited: _Visited) -> Files:
    """Return the images of each class that has any."""
    classes = {name: paths for name, paths in _classes(folder, visited).items() if paths}
    why = f"{folder} contains no class directory with images ({' '.join(EXTENSIONS)})"
    check(bool(classes), "root", str(folder), why, "put the images of each class into a separate directory")
    return classes


def _classes(folder: Path, visited: _Visited) -> Files:
    """Return the images of each class. Every subdirectory of `folder` is a class; its images may be at any depth."""
    beside = Counter[str]()
    names = _folders(folder, visited, beside)
    others = Counter({f"{kind} in no class directory" * (kind in EXTENSIONS) or kind: n for kind, n in beside.items()})
    classes = {name: _images(folder / name, others, visited) for name in names}
    visited.num_files += sum(map(len, classes.values())) + others.total()
    if others.total():
        kinds = ", ".join(f"{count} {kind}" for kind, count in (+others).most_common(10))
        part = f"{folder.name}/: " if folder != visited.root else ""
        visited.notes.append(f"{part}ignored {others.total()} files and folders ({kinds})")
    return classes


def _folders(path: Path, visited: _Visited, others: Counter[str] | None = None) -> list[str]:
    """Return the sorted names of the directories in `path` that are not hidden, and count all else in `others`."""
    try:
        visited.add(str(path))
        entries = list(os.scandir(path))
        for entry in entries:
            visited.check_link(entry.path)
        names = sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))
    except OSError as error:
        _cannot_read(error)
    if others is not None:
        others.update(kind_of(name) for name in {entry.name for entry in entries}.difference(names))
    return names


def is_hidden(name: str) -> bool:
    """Return whether a file or directory of this name holds no data; macOS puts `__MACOSX` into archives."""
    return name.startswith(".") or name == "__MACOSX"


def kind_of(name: str) -> str:
    """Return `hidden`, the extension of a file name in lower case, or `without extension`."""
    return "hidden" if is_hidden(name) else os.path.splitext(name)[1].lower() or "without extension"


def _images(path: Path, others: Counter[str], visited: _Visited) -> list[str]:
    """Return the sorted paths of the images below `path`, at any depth, and count all else in `others` by its kind."""
    images: list[str] = []
    seen = {str(parent) for parent in Path(os.path.realpath(path)).parents}  # they hold images of other classes
    for where, folders, names in os.walk(path, followlinks=True, onerror=_cannot_read):
        real = os.path.realpath(where)
        visited.check_link(where)
        if real in seen:  # a symbolic link to a parent directory
            folders.clear()
            continue
        others["hidden"] += sum(map(is_hidden, folders))
        folders[:] = [name for name in folders if not is_hidden(name)]
        seen.add(real)
        visited.add(where)
        levels = where.count(os.sep) - str(path).count(os.sep)
        why = f"{path} contains directories that are nested more than {MOST_LEVELS} times"
        check(levels <= MOST_LEVELS, "root", ABSENT, why, "put the images into fewer levels")
        for name in names:
            kind = kind_of(name)
            if kind in EXTENSIONS:
                images.append(os.path.join(where, name))
            else:
                visited.check_link(os.path.join(where, name))
                others[kind] += 1
    return sorted(images)


def _cannot_read(error: OSError) -> NoReturn:
    why = f"{error.filename} cannot be listed: {error.strerror}"
    raise ConfigError("root", ABSENT, why, "check the permissions of the directory") from None


def _first_five(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
