"""Files of `torch.save` that somebody else may have written."""

from __future__ import annotations

import pickletools
import reprlib
import zipfile
from pathlib import Path
from typing import Any

import torch

from runner.storage.safe_read import open_regular

_HARMLESS = ("builtins set", "__builtin__ set", "builtins complex", "__builtin__ complex")


class UnusualFileError(Exception):
    """`torch.save` writes no such file."""


def load_tensors(path: Path) -> Any:
    """Return the tensors and plain values in a file of `torch.save`, on the CPU.

    With `weights_only`, a pickle cannot run code. A zip archive cannot take more memory than its file does. Tensors are
    mapped to memory instead of read, so that none claims more bytes than there are.

    Raises:
        UnusualFileError: if it is a zip archive with compressed or overlapping entries, or of other objects.
        OSError: if it cannot be read.
        Exception: whatever torch raises for other content.
    """
    mapped = _checked(path)
    return torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)


def _checked(path: Path) -> bool:
    """Check a zip archive; returns False for a file of PyTorch 1.5 or earlier, which is none."""
    with open_regular(path) as file:
        if not zipfile.is_zipfile(file):
            return False
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
    """Check that a pickle only names what tensors and plain values need.

    torch also allows `bytearray` and encodings, which take any amount of memory.
    """
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            module = str(argument).partition(" ")[0]
            if not (module in ("torch", "collections") or module.startswith("torch.") or argument in _HARMLESS):
                raise UnusualFileError(f"it contains {reprlib.repr(argument)}")
