"""MNIST, Fashion-MNIST and CIFAR-10, which torchvision downloads and reads, and which are held in memory."""

from __future__ import annotations

import fcntl
import socket
import tarfile
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torchvision

from runner.config.errors import ConfigError, check_choice, check_range
from runner.data.augment import POLICIES, Augment
from runner.data.base import Data, Samples
from runner.data.memory import TensorSamples
from runner.storage.files import check_readable

_PATIENCE = 10  # seconds until a server must respond
_MAX_BYTES = 64 * 2**20
"""Size limit of a file. The largest files (MNIST, Fashion-MNIST) have 47,040,016 bytes."""

_NO_DOWNLOAD = "or use data=digits, which needs no download"


@dataclass
class Downloadable(Data):
    """The base class of data sets that torchvision can download; for options, see `conf/data/_torchvision.yaml`."""

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("root", "download")
    dataset: ClassVar[str]
    folder: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    shape: ClassVar[tuple[int, int, int]]
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
        check_range(self, "crop", least=0, most=self.shape[1] // 2)
        check_choice(self, "auto_augment", POLICIES)
        check_range(self, "random_erase", least=0, most=1)

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return new values for saved options, so that the config of a saved run cannot start a download."""
        return super().untrusted_values(values) | ({"download": False} if "download" in values else {})

    def load(self) -> tuple[Samples, Samples]:
        if self.download and self._missing():
            try:
                self._download(Path(self.root).expanduser())
            except (OSError, EOFError, ValueError, RuntimeError, zlib.error, tarfile.TarError) as error:
                why = f"the download failed ({' '.join(str(error).split()) or type(error).__name__})"
                raise ConfigError("download", True, why, f"try again; {_NO_DOWNLOAD}") from None
        if missing := self._missing():
            copy = f"copy {', '.join(self.files)} to {self._directory}"
            remedy = f"data.download=true downloads it; or {copy}; {_NO_DOWNLOAD}"
            raise ConfigError("root", self.root, f"there is no {missing[0]}", remedy)
        train, held_out = self._split(train=True), self._split(train=False)
        augment = Augment(self.auto_augment, self.random_erase, self.mean)
        return self._samples(*train, flip=self.flip, crop=self.crop, augment=augment), self._samples(*held_out)

    def _download(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        timeout = socket.getdefaulttimeout()
        with (root / ".lock").open("a") as lock:  # "w" would empty a file of this name that somebody else has written
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be downloading: then nothing is missing afterwards
            socket.setdefaulttimeout(_PATIENCE)  # torchvision sets none, and that of the operating system is minutes
            try:
                getattr(torchvision.datasets, self.dataset)(root, download=True)
            finally:
                socket.setdefaulttimeout(timeout)

    def _samples(self, images: torch.Tensor, targets: torch.Tensor, **options: Any) -> TensorSamples:
        return TensorSamples(images, targets, self.class_names, self.mean, self.std, **options)

    @property
    def _directory(self) -> Path:
        return Path(self.root).expanduser() / self.folder

    def _missing(self) -> list[Path]:
        check_readable("root", self._directory / self.files[0])
        return [path for name in self.files if not (path := self._directory / name).is_file()]

    def _split(self, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            large = [name for name in self.files if (self._directory / name).stat().st_size > _MAX_BYTES]
            if large:
                raise ValueError(f"{large[0]} has more than {_MAX_BYTES:,} bytes")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some versions of NumPy warn about pickles of NumPy 1
                # CIFAR-10 consists of pickles: torchvision reads them only if their MD5 is that of the original.
                found = getattr(torchvision.datasets, self.dataset)(Path(self.root).expanduser(), train=train)
            images, targets = self._images(found.data), torch.as_tensor(found.targets)
            if images.shape != (max(len(targets), 1), *self.shape) or not targets.max() < len(self.class_names):
                labels = f"{len(targets)} labels up to {targets.amax() if len(targets) else 0}"
                raise ValueError(f"it has {labels} for images of the shape {list(images.shape)}")
        except Exception as error:  # a damaged file raises anything from AssertionError to IndexError
            why = f"the files in {self._directory} are damaged ({error or type(error).__name__})"
            remedy = f"delete them and set data.download=true to download them again; {_NO_DOWNLOAD}"
            raise ConfigError("root", self.root, why, remedy) from None
        return images, targets

    def _images(self, data: Any) -> torch.Tensor:
        return data[:, None]


@dataclass
class Mnist(Downloadable):
    """70,000 grayscale images of handwritten digits, 28×28 (LeCun, Cortes, Burges: The MNIST Database, 1998)."""

    dataset: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "MNIST/raw"
    files: ClassVar[tuple[str, ...]] = tuple(
        f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    )
    shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    class_names: ClassVar[list[str]] = [str(digit) for digit in range(10)]


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
    files: ClassVar[tuple[str, ...]] = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta")
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    class_names: ClassVar[list[str]] = [
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    ]  # fmt: skip

    flip: bool = True
    crop: int = 4

    def _images(self, data: Any) -> torch.Tensor:
        return torch.from_numpy(data).permute(0, 3, 1, 2).contiguous()  # torchvision puts the channels last
