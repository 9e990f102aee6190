"""MNIST, Fashion-MNIST and CIFAR-10, which torchvision downloads, and which are held in memory.

This module, not torchvision, reads the files, so that error messages name the file that is missing or damaged.
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
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
import torchvision

from runner.config.errors import ConfigError, check, check_choice, check_range
from runner.data.auto_augment import POLICIES, Augment
from runner.data.base import Data, Samples
from runner.data.memory import TensorSamples
from runner.storage.regular_file import check_readable

_PATIENCE = 10
"""Number of seconds that a server may take to respond."""

_DAMAGED = (OSError, EOFError, ValueError, RuntimeError, zlib.error, struct.error, tarfile.TarError)
"""The exceptions that reading a damaged file may raise."""

_LIMIT_BYTES = 64 * 2**20
"""Size limit of a file after decompression. The largest files (MNIST, Fashion-MNIST) have 47,040,016 bytes."""

LabeledImages = tuple["torch.Tensor", "torch.Tensor"]
"""Images, uint8 [n, channels, height, width], and class indices, int64 [n]."""


@dataclass
class Downloadable(Data):
    """The base class of data sets that torchvision can download.

    Args:
        root: the directory that contains the data set's own directory, such as `MNIST`.
        download: True to download missing files to `root`; False to raise an error if files are missing.
        flip: mirror each training image horizontally with probability 1/2.
        crop: shift training images by up to this many pixels in each direction.
        auto_augment: further transforms of training images: `randaugment`, `trivialaugment` or `none` (see `Augment`).
        random_erase: probability of erasing a random rectangle of a training image.
    """

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("root", "download")
    """Options that may differ on resume, because they do not affect the samples."""

    dataset: ClassVar[str]
    """The name of the class in `torchvision.datasets`."""
    folder: ClassVar[str]
    """The directory of the data set's files, relative to `root`."""
    side: ClassVar[int]
    """Height and width of an image in pixels."""
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    class_names: ClassVar[list[str]]

    root: str = "data"
    download: bool = False
    flip: bool = False
    crop: int = 0
    auto_augment: str = "none"
    random_erase: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "crop", least=0, most=self.side // 2)
        check_choice(self, "auto_augment", POLICIES)
        check_range(self, "random_erase", least=0, most=1)

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return new values for saved options, so that the config of a saved run cannot start a download.

        Args:
            values: the options of the data set in the saved config, without those that the command line overrides.

        Returns:
            The options to change, with their new values: `download` becomes False.
        """
        return super().untrusted_values(values) | ({"download": False} if "download" in values else {})

    def load(self) -> tuple[Samples, Samples]:
        if self.download and self._missing():
            self._download()
        missing = self._missing()
        check(not missing, "root", self.root, f"there is no {missing[0] if missing else ''}", self._remedy())
        train, held_out = self._split(train=True), self._split(train=False)
        augment = Augment(self.auto_augment, self.random_erase, self.mean)
        return self._samples(*train, flip=self.flip, crop=self.crop, augment=augment), self._samples(*held_out)

    def _samples(self, images: torch.Tensor, targets: torch.Tensor, **options: Any) -> TensorSamples:
        return TensorSamples(images, targets, self.class_names, self.mean, self.std, **options)

    @abstractmethod
    def _split(self, train: bool) -> LabeledImages:
        """Return the training set if `train` is True, and the test set otherwise."""

    @abstractmethod
    def _files(self) -> list[str]:
        """Return the names of all required files."""

    def _path(self, name: str) -> Path:
        return Path(self.root).expanduser() / self.folder / name

    def _missing(self) -> list[Path]:
        check_readable("root", Path(self.root).expanduser() / self.folder / self._files()[0])
        return [self._path(name) for name in self._files() if not self._path(name).is_file()]

    def _download(self) -> None:
        root = Path(self.root).expanduser()
        try:
            with _locked(root), _socket_timeout():
                # It checks again which files exist: another process may have downloaded them in the meantime.
                getattr(torchvision.datasets, self.dataset)(root, download=True)
        except _DAMAGED as error:
            why = f"the download failed ({' '.join(str(error).split()) or type(error).__name__})"
            raise ConfigError("download", True, why, self._remedy("try again")) from None

    def _content(self, path: Path) -> bytearray:
        """Return the content of the file `path`, decompressed if its name ends in `.gz`."""
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                content = bytearray(file.read(_LIMIT_BYTES + 1))
        except _DAMAGED as error:
            self._raise_damaged(path, error)
        if len(content) > _LIMIT_BYTES:
            self._raise_damaged(path, f"it has more than {_LIMIT_BYTES:,} bytes")
        return content

    def _remedy(self, first: str = "data.download=true downloads it") -> str:
        names = ", ".join(self._files())
        return f"{first}; or copy {names} to {self._path('')}; or use data=digits, which needs no download"

    def _raise_damaged(self, path: Path, why: object) -> NoReturn:
        remedy = (
            "delete it and set data.download=true to download it again; or use data=digits, which needs no download"
        )
        raise ConfigError("root", self.root, f"{path} is damaged ({why})", remedy) from None


@dataclass
class Mnist(Downloadable):
    """70,000 grayscale images of handwritten digits, 28×28 (LeCun, Cortes, Burges: The MNIST Database, 1998)."""

    dataset: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "MNIST/raw"
    side: ClassVar[int] = 28
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    class_names: ClassVar[list[str]] = [str(digit) for digit in range(10)]

    def _files(self) -> list[str]:
        return [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]

    def _path(self, name: str) -> Path:
        """Return the path of the file `name`, or of the compressed file (`.gz`) if only the compressed file exists."""
        path = super()._path(name)
        compressed = path.with_name(f"{name}.gz")
        return compressed if compressed.is_file() and not path.is_file() else path

    def _split(self, train: bool) -> LabeledImages:
        split = "train" if train else "t10k"
        path = self._path(f"{split}-labels-idx1-ubyte")
        images, targets = self._read(self._path(f"{split}-images-idx3-ubyte"), 3), self._read(path, 1).long()
        largest = max(targets.tolist(), default=0)
        if not 0 < len(targets) == len(images) or largest >= len(self.class_names):
            self._raise_damaged(path, f"it has {len(targets)} labels up to {largest} for {len(images)} images")
        if images.shape[1:] != (self.side, self.side):
            self._raise_damaged(
                self._path(f"{split}-images-idx3-ubyte"), f"its images have {images.shape[1]}×{images.shape[2]} pixels"
            )
        return images[:, None], targets

    def _read(self, path: Path, dims: int) -> torch.Tensor:
        """Return the uint8 tensor with `dims` dimensions in an IDX file.

        An IDX file starts with two zero bytes, the data type (8 for uint8), the number of dimensions, and the shape as
        big-endian 32-bit integers.
        """
        content = self._content(path)
        if content[:4] != bytes((0, 0, 8, dims)):
            self._raise_damaged(path, f"it starts with {bytes(content[:4])!r}")
        try:
            shape = struct.unpack_from(f">{dims}I", content, 4)
            return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dims).view(shape)
        except _DAMAGED as error:
            self._raise_damaged(path, error)


@dataclass
class FashionMnist(Mnist):
    """70,000 grayscale images of clothing, 28×28 (Xiao, Rasul, Vollgraf: Fashion-MNIST, 2017)."""

    dataset: ClassVar[str] = "FashionMNIST"
    folder: ClassVar[str] = "FashionMNIST/raw"
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    class_names: ClassVar[list[str]] = [
        "t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    ]  # fmt: skip


@dataclass
class Cifar10(Downloadable):
    """60,000 photographs in ten classes, 32×32 (Krizhevsky, Learning Multiple Layers of Features, 2009)."""

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

    def _split(self, train: bool) -> LabeledImages:
        source = torchvision.datasets.CIFAR10
        files = [self._read(name, checksum) for name, checksum in (source.train_list if train else source.test_list)]
        return torch.cat([images for images, _ in files]), torch.cat([targets for _, targets in files])

    def _read(self, name: str, checksum: str) -> LabeledImages:
        content = self._content(self._path(name))
        # Unpickling can execute arbitrary code, so only the original files are unpickled.
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != checksum:
            self._raise_damaged(self._path(name), "its MD5 checksum differs from that of the original file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some versions of NumPy warn about pickles of NumPy 1
            batch = pickle.loads(content, encoding="latin1")
        return torch.from_numpy(batch["data"]).view(-1, 3, 32, 32), torch.tensor(batch["labels"])


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Lock `root`, so that only one process of a distributed run downloads the files."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a") as lock:  # "w" would empty a file of this name that somebody else has written
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _socket_timeout() -> Iterator[None]:
    """Set a socket timeout, because torchvision sets none and the default of the operating system is minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
