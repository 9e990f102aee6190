"""Data sets that torchvision can download, kept in memory: MNIST, Fashion-MNIST, CIFAR-10.

The files are read here, not by torchvision, so that one that is missing or damaged is named.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import pickle
import socket
import struct
import tarfile
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

import torch
import torchvision

from runner.config.errors import ConfigError, check, check_range
from runner.data.base import Data, Samples
from runner.data.memory import TensorSamples

_PATIENCE = 10
"""Seconds that a server may be silent."""

_DAMAGED = (OSError, EOFError, ValueError, RuntimeError, zlib.error, struct.error, tarfile.TarError)
"""What readers raise about files that are not what they should be."""

Labelled = tuple["torch.Tensor", "torch.Tensor"]
"""Images, uint8 [n, channels, height, width], and their classes, int64 [n]."""


@dataclass
class Downloadable(Data):
    """What these data sets have in common.

    Args:
        root: the folder that holds the data set's own folder, as torchvision lays it out.
        download: fetch files that are not there. The only thing that a run writes outside of its outputs.
        flip: mirror half of the training images.
        crop: pixels that training images are shifted by at most.
    """

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("root", "download")
    """Options that change how the work is done, not what is computed: they may differ on a resume."""

    dataset: ClassVar[str]
    """torchvision's name of it."""
    folder: ClassVar[str]
    side: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    class_names: ClassVar[list[str]]

    root: str = "data"
    download: bool = False
    flip: bool = False
    crop: int = 0

    def __post_init__(self) -> None:
        check_range(self, "crop", least=0, most=self.side // 2)

    def load(self) -> tuple[Samples, Samples]:
        if self.download and self._missing():
            self._fetch()
        missing = self._missing()
        check(not missing, "root", self.root, f"there is no {missing[0] if missing else ''}", self._advice())
        train, held_out = self._split(train=True), self._split(train=False)
        return self._samples(*train, flip=self.flip, crop=self.crop), self._samples(*held_out, flip=False, crop=0)

    def _samples(self, images: torch.Tensor, targets: torch.Tensor, flip: bool, crop: int) -> TensorSamples:
        return TensorSamples(images, targets, self.class_names, self.mean, self.std, flip=flip, crop=crop)

    def _split(self, train: bool) -> Labelled:
        raise NotImplementedError

    def _files(self) -> list[str]:
        """The names of all files that are needed."""
        raise NotImplementedError

    def _path(self, name: str) -> Path:
        return Path(self.root).expanduser() / self.folder / name

    def _missing(self) -> list[Path]:
        return [self._path(name) for name in self._files() if not self._path(name).is_file()]

    def _fetch(self) -> None:
        root = Path(self.root).expanduser()
        try:
            with _alone(root), _impatient():
                # It looks again what is there: another process may have been faster.
                getattr(torchvision.datasets, self.dataset)(root, download=True)
        except _DAMAGED as error:
            why = f"the download failed ({' '.join(str(error).split()) or type(error).__name__})"
            raise ConfigError("download", True, why, self._advice("try again")) from None

    def _advice(self, first: str = "data.download=true fetches it") -> str:
        names = ", ".join(self._files())
        return f"{first}; or put {names} into {self._path('')}; or choose data=digits, which needs no download"

    def _refuse(self, path: Path, why: object) -> NoReturn:
        remedy = "delete it, and data.download=true fetches it again; or choose data=digits, which needs no download"
        raise ConfigError("root", self.root, f"{path} is damaged ({why})", remedy) from None


@dataclass
class Mnist(Downloadable):
    """70,000 handwritten digits, 28×28, grey (LeCun, Cortes, Burges: The MNIST Database, 1998)."""

    dataset: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "MNIST/raw"
    side: ClassVar[int] = 28
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    class_names: ClassVar[list[str]] = [str(digit) for digit in range(10)]

    def _files(self) -> list[str]:
        return [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]

    def _path(self, name: str) -> Path:
        """The file itself, or where only that is there, compressed as it is distributed."""
        path = super()._path(name)
        packed = path.with_name(f"{name}.gz")
        return packed if packed.is_file() and not path.is_file() else path

    def _split(self, train: bool) -> Labelled:
        part = "train" if train else "t10k"
        path = self._path(f"{part}-labels-idx1-ubyte")
        images, targets = self._read(self._path(f"{part}-images-idx3-ubyte"), 3), self._read(path, 1).long()
        largest = max(targets.tolist(), default=0)
        if not 0 < len(targets) == len(images) or largest >= len(self.class_names):
            self._refuse(path, f"{len(targets)} labels up to {largest} for {len(images)} images")
        return images[:, None], targets

    def _read(self, path: Path, dims: int) -> torch.Tensor:
        """An IDX file: two zeros, type (8: bytes), number of dimensions, each as big-endian int32, and the bytes."""
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                content = bytearray(file.read())
            if content[:4] != bytes((0, 0, 8, dims)):
                raise ValueError(f"it begins with {bytes(content[:4])!r}")
            shape = struct.unpack_from(f">{dims}I", content, 4)
            return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dims).view(shape)
        except _DAMAGED as error:
            self._refuse(path, error)


@dataclass
class FashionMnist(Mnist):
    """70,000 articles of clothing, 28×28, grey (Xiao, Rasul, Vollgraf: Fashion-MNIST, 2017)."""

    dataset: ClassVar[str] = "FashionMNIST"
    folder: ClassVar[str] = "FashionMNIST/raw"
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    class_names: ClassVar[list[str]] = [
        "t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    ]  # fmt: skip


@dataclass
class Cifar10(Downloadable):
    """60,000 photographs of ten kinds of things, 32×32 (Krizhevsky, Learning Multiple Layers of Features, 2009)."""

    dataset: ClassVar[str] = "CIFAR10"
    folder: ClassVar[str] = "cifar-10-batches-py"
    side: ClassVar[int] = 32
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    class_names: ClassVar[list[str]] = [
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    ]  # fmt: skip

    flip: bool = True
    crop: int = 4

    def _files(self) -> list[str]:
        return [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]

    def _split(self, train: bool) -> Labelled:
        source = torchvision.datasets.CIFAR10
        parts = [self._read(name, checksum) for name, checksum in (source.train_list if train else source.test_list)]
        return torch.cat([images for images, _ in parts]), torch.cat([targets for _, targets in parts])

    def _read(self, name: str, checksum: str) -> Labelled:
        packed = self._path(name).read_bytes()
        # A pickle can run any code: it is opened only if it is the one that was published.
        if hashlib.md5(packed, usedforsecurity=False).hexdigest() != checksum:
            self._refuse(self._path(name), "its MD5 sum is not that of the file that was published")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some versions of NumPy find fault with a pickle of 2009
            content = pickle.loads(packed, encoding="latin1")
        return torch.from_numpy(content["data"]).view(-1, 3, 32, 32), torch.tensor(content["labels"])


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process at a time: those of a distributed run all want the same files."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _impatient() -> Iterator[None]:
    """Give up on a silent server soon: torchvision names no timeout, and a connection's own takes minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
