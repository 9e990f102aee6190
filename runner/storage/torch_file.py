"""Safe loading of `torch.save` files that somebody else may have written."""

from __future__ import annotations

import pickletools
import reprlib
import zipfile
from pathlib import Path
from typing import Any

import torch

from runner.storage.safe_read import open_regular, utf8_path

_HARMLESS = ("builtins set", "__builtin__ set", "builtins complex", "__builtin__ complex")


_ZIP = b"PK\x03\x04"
"""The first bytes of a zip archive."""


class UnusualFileError(Exception):
    """Raised for a file that `torch.save` cannot have written."""


def load_tensors(path: Path) -> Any:
    """Return the tensors and plain values in a `torch.save` file, on the CPU.

    With `weights_only`, a pickle cannot run code. A zip archive whose entries are larger than its file is refused.
    Tensors are memory-mapped instead of read, so that no tensor can claim more bytes than the file has.

    Raises:
        UnusualFileError: if the file is a zip archive whose entries are compressed or overlap, or contain objects other
            than tensors and plain values.
        OSError: if the file cannot be read.
        Exception: whatever torch raises for other content.
    """
    mapped = _checked(path)
    with utf8_path(path) as file:
        return torch.load(file, weights_only=True, map_location="cpu", mmap=mapped)


def _checked(path: Path) -> bool:
    """Return whether the file at `path` is a zip archive; before returning True, check the entries of the archive.

    Files of PyTorch 1.5 or earlier are not zip archives.
    """
    with open_regular(path) as file:
        begin = file.read(len(_ZIP))
        file.seek(0)
        if begin != _ZIP:  # how torch tells them apart
            return False
        if not zipfile.is_zipfile(file):
            raise UnusualFileError("it begins like a zip archive, and is none")
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise UnusualFileError("it is compressed")
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise UnusualFileError("its entries are larger than the file")
            for entry in entries:
                if entry.filename.lower().endswith(".pkl"):  # torch does not distinguish upper and lower case
                    _check_names(archive.read(entry))
    return True


def _check_names(pickled: bytes) -> None:
    """Check that a pickle names only classes and functions that tensors and plain values need.

    `torch.load` also allows `bytearray` and encodings, which can take any amount of memory.
    """
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            module = str(argument).partition(" ")[0]
            if not (module in ("torch", "collections") or module.startswith("torch.") or argument in _HARMLESS):
                raise UnusualFileError(f"it contains {reprlib.repr(argument)}")
