"""Safe loading of files that were written by `torch.save` and may come from an untrusted source."""

from __future__ import annotations

import io
import pickletools
import reprlib
import zipfile
from pathlib import Path
from typing import Any

import torch

from runner.storage.files import open_regular
from runner.storage.value_checks import UnexpectedContentError

_HARMFUL = ("bytearray", "encode", "_rebuild_nested_tensor")
"""Functions that `torch.load` allows, but that can allocate any amount of memory or read outside of a tensor."""
_LEGACY_PICKLES = 5
"""The number of pickles in a file of PyTorch 1.5 or earlier: magic number, version, machine, content, storage keys."""
_MAX_SHARED = 10
"""The maximum ratio of the bytes of all tensors to those of the file. It exceeds 1: tied parameters share memory."""
_MAX_VALUES, _MAX_DEPTH = 3_000_000, 100
_ZIP = b"PK\x03\x04"
"""The first bytes of a zip archive, by which torch recognizes it."""


def load_tensors(path: Path) -> Any:
    """Return the tensors and plain values in a `torch.save` file, on the CPU.

    The file is loaded with `weights_only`, so that it cannot run code. The tensors of a zip archive are memory-mapped,
    so that no storage can have more bytes than the file.

    Raises:
        UnexpectedContentError: if the file could take far more memory than its own size.
        OSError: if the file cannot be read.
        Exception: any exception of torch, `zipfile` or `pickletools`, if it is no valid file, or torch refuses it.
    """
    with open_regular(path) as file:
        is_zip = file.peek(len(_ZIP)).startswith(_ZIP)
        if is_zip:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                    raise UnexpectedContentError("it is compressed")
                if sum(entry.file_size for entry in entries) > path.stat().st_size:
                    raise UnexpectedContentError("its entries are larger than the file")
                for entry in entries:
                    if entry.filename.lower().endswith(".pkl"):  # torch does not distinguish upper and lower case
                        _check_pickle(io.BytesIO(archive.read(entry)))
        else:
            for _ in range(_LEGACY_PICKLES):
                if file.peek(1):
                    _check_pickle(file)
    content = torch.load(path, weights_only=True, map_location="cpu", mmap=is_zip)
    _check_sizes(content, path.stat().st_size)
    return content


def _check_pickle(file: Any) -> None:
    """Check that a pickle names no function in `_HARMFUL`; torch refuses other opcodes that name one."""
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL" and str(argument).rpartition(" ")[2] in _HARMFUL:
            raise UnexpectedContentError(f"it contains {reprlib.repr(argument)}")


def _check_sizes(content: Any, file_bytes: int) -> None:
    """Check that nested values are few, counting a shared one each time, and tensors not far larger than the file."""
    remaining, num_values, tensor_bytes = [(content, 0)], 0, 0
    while remaining:
        value, depth = remaining.pop()
        num_values += 1
        if num_values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise UnexpectedContentError("it contains too many nested values")
        if isinstance(value, torch.Tensor):
            dense = value.layout == torch.strided and value.device.type == "cpu"
            tensor_bytes += value.nbytes if dense else 0
            if not dense or tensor_bytes > _MAX_SHARED * file_bytes:
                raise UnexpectedContentError(
                    f"it contains a tensor {reprlib.repr(list(value.shape))} without its values"
                )
        elif isinstance(value, dict | list | tuple | set):
            remaining += [(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value)]
