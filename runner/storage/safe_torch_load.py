"""Safe loading of files that were written by `torch.save` and may come from an untrusted source."""

from __future__ import annotations

import io
import pickletools
import reprlib
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from runner.storage.regular_file import open_regular, utf8_path

_HARMLESS = ("builtins set", "__builtin__ set", "builtins complex", "__builtin__ complex")
_HARMFUL = ("bytearray", "encode", "_rebuild_nested_tensor")
"""Functions that `torch.load` allows, but that can allocate any amount of memory or read outside of a tensor."""
_LEGACY_PICKLES = 5
"""The number of pickles in a file of PyTorch 1.5 or earlier: magic number, version, machine, content, storage keys."""
_MOST_SHARED = 10
"""The maximum ratio of the bytes of all tensors to those of the file. It exceeds 1: tied parameters share memory."""

_ZIP = b"PK\x03\x04"
"""The first bytes of a zip archive."""


class UnusualFileError(Exception):
    """Raised for a file that is not an ordinary `torch.save` file of tensors and plain values."""


def load_tensors(path: Path) -> Any:
    """Return the tensors and plain values in a `torch.save` file, on the CPU.

    The file is loaded with `weights_only`, so that it cannot run code. The tensors of a zip archive are memory-mapped,
    so that no storage can have more bytes than the file.

    Raises:
        UnusualFileError: if the file is a zip archive with compressed or overlapping entries; if it is a zip archive
            with objects other than tensors and plain values; if a pickle in the file names a function that can
            allocate any amount of memory or read outside of a tensor; or if the tensors are far larger than the file.
        OSError: if the file cannot be read.
        Exception: any exception of torch, `zipfile` or `pickletools`, if the file is not a valid `torch.save` file or
            torch refuses to load it.
    """
    mapped = _checked(path)
    with utf8_path(path) as file:
        content = torch.load(file, weights_only=True, map_location="cpu", mmap=mapped)
    _check_sizes(content, path.stat().st_size)
    return content


def _checked(path: Path) -> bool:
    """Check that the file at `path` is safe to load with `weights_only`; return whether it is a zip archive.

    No pickle in the file may name a function in `_HARMFUL`. The pickles in a zip archive must also pass `_check_names`.
    The entries of a zip archive must not be compressed, and their total size must not exceed the size of the archive.
    Files of PyTorch 1.5 or earlier are not zip archives.

    Raises:
        UnusualFileError: if a check fails.
        OSError: if the file cannot be read.
    """
    with open_regular(path) as file:
        begin = file.read(len(_ZIP))
        file.seek(0)
        if begin != _ZIP:  # how torch tells them apart
            for _ in range(_LEGACY_PICKLES):
                if file.peek(1):
                    _check_harmless(file)
            return False
        if not zipfile.is_zipfile(file):
            raise UnusualFileError("it begins like a zip archive, but is not one")
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
    """Check that the classes and functions in a pickle belong to `torch`, `collections` or `_HARMLESS`.

    Only the opcode `GLOBAL` is examined: `torch.load` with `weights_only` refuses the other opcodes that name classes
    or functions. It also refuses many names that pass this check.

    Raises:
        UnusualFileError: if the pickle names a class or function from elsewhere, or a function in `_HARMFUL`.
    """
    for name in _check_harmless(io.BytesIO(pickled)):
        module = name.partition(" ")[0]
        if not (module in ("torch", "collections") or module.startswith("torch.") or name in _HARMLESS):
            raise UnusualFileError(f"it contains {reprlib.repr(name)}")


def _check_harmless(file: BinaryIO) -> list[str]:
    """Check that a pickle refers to no function in `_HARMFUL`, and return the names of its classes and functions."""
    names = [str(argument) for opcode, argument, _ in pickletools.genops(file) if opcode.name == "GLOBAL"]
    for name in names:
        if name.rpartition(" ")[2] in _HARMFUL:
            raise UnusualFileError(f"it contains {reprlib.repr(name)}")
    return names


def _check_sizes(content: Any, file_bytes: int) -> None:
    """Check that tensors in nested dicts and lists are not far larger than the file.

    A small file can describe a tensor of any size, if all elements share memory or the elements are not in the file.
    """
    seen, remaining, tensor_bytes = set(), [content], 0
    while remaining:
        value = remaining.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            dense = value.layout == torch.strided and value.device.type == "cpu"
            tensor_bytes += value.nbytes if dense else 0
            if not dense or tensor_bytes > _MOST_SHARED * file_bytes:
                raise UnusualFileError(f"it contains a tensor {reprlib.repr(list(value.shape))} without its values")
        elif isinstance(value, dict):
            remaining += value.values()
        elif isinstance(value, list | tuple | set):
            remaining += value
