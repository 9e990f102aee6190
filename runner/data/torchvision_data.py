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

from runner.config.errors import ConfigError
from runner.config.limits import Range, check_range
from runner.data.augment import Augmented
from runner.data.base import Samples
from runner.data.memory import TensorSamples

_PATIENCE = 10  # seconds until a server must respond
_MAX_BYTES = 64 * 2**20
"""Size limit of a file. The largest files (MNIST, Fashion-MNIST) have 47,040,016 bytes."""

_NO_DOWNLOAD = "or use data=digits, which needs no download"


@dataclass
class Downloadable(Augmented):
    """The base class of data sets that torchvision can download; for options, see `conf/data/_torchvision.yaml`."""

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("root", "download")
    dataset: ClassVar[str]
    folder: ClassVar[str]
    shape: ClassVar[tuple[int, int, int]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    class_names: ClassVar[list[str]]

    root: str = "data"
    download: bool = False
    flip: bool = False
    crop: int = 0

    def __post_init__(self) -> None:
        check_range(self, "crop", Range(least=0, most=self.shape[1] // 2))

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return new values for saved options, so that the config of a saved run cannot start a download."""
        return super().untrusted_values(values) | ({"download": False} if "download" in values else {})

    def load(self) -> tuple[Samples, Samples]:
        try:
            return self._read()
        except ConfigError:
            if not self.download:
                raise
        self._download(Path(self.root).expanduser())
        return self._read()

    def _read(self) -> tuple[Samples, Samples]:
        augment = self.transform(self.mean)
        return self._split(True, flip=self.flip, crop=self.crop, augment=augment), self._split(False)

    def _download(self, root: Path) -> None:
        timeout = socket.getdefaulttimeout()
        try:
            root.mkdir(parents=True, exist_ok=True)
            # "w" would empty a file of this name that somebody else has written. While another process downloads, this
            # one waits, and then nothing is missing.
            with (root / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                socket.setdefaulttimeout(_PATIENCE)  # torchvision sets none, and the operating system's is minutes
                getattr(torchvision.datasets, self.dataset)(root, download=True)
        except (OSError, EOFError, ValueError, RuntimeError, zlib.error, tarfile.TarError) as error:
            why = f"the download failed ({' '.join(str(error).split()) or type(error).__name__})"
            raise ConfigError("download", True, why, f"try again; {_NO_DOWNLOAD}") from None
        finally:
            socket.setdefaulttimeout(timeout)

    def _split(self, train: bool, **options: Any) -> TensorSamples:
        root = Path(self.root).expanduser()
        directory = root / self.folder
        try:
            for path in directory.iterdir():
                if path.stat().st_size > _MAX_BYTES:
                    raise ValueError(f"{path.name} has more than {_MAX_BYTES:,} bytes")
            with warnings.catch_warnings(action="ignore"):  # some versions of NumPy warn about pickles of NumPy 1
                # CIFAR-10 consists of pickles: torchvision reads them only if their MD5 is that of the original.
                found = getattr(torchvision.datasets, self.dataset)(root, train=train)
            images, targets = torch.as_tensor(found.data), torch.as_tensor(found.targets)
            # torchvision puts the channels last, but those of gray images have no dimension.
            images = images.permute(0, 3, 1, 2).contiguous() if images.dim() == 4 else images[:, None]
            if images.shape != (max(len(targets), 1), *self.shape) or not targets.max() < len(self.class_names):
                labels = f"{len(targets)} labels up to {targets.amax() if len(targets) else 0}"
                raise ValueError(f"it has {labels} for images of the shape {list(images.shape)}")
        except Exception as error:  # a damaged file raises anything from AssertionError to IndexError
            why = f"{self.dataset} cannot be read from {directory} ({error or type(error).__name__})"
            remedy = f"data.download=true downloads what is missing; delete damaged files before; {_NO_DOWNLOAD}"
            raise ConfigError("root", self.root, why, remedy) from None
        return TensorSamples(images, targets, self.class_names, self.mean, self.std, **options)


@dataclass
class Mnist(Downloadable):
    """70,000 grayscale images of handwritten digits, 28×28 (LeCun, Cortes, Burges: The MNIST Database, 1998)."""

    dataset: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "MNIST/raw"
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
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    class_names: ClassVar[list[str]] = [
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    ]  # fmt: skip

    flip: bool = True
    crop: int = 4
