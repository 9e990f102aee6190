"""Write checkpoints with arbitrary content and correct hashes, and pickles that run code."""

import copy
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

Keys = tuple[Any, ...]
"""The keys and indices that lead to a value in nested dicts, lists and tuples."""

REMOVE_KEY = object()
"""As a new value, it removes the key."""


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call[0], self.call[1:]


def rewrite_manifest(path: Path, **changes: Any) -> None:
    """Rewrite the manifest of the checkpoint at `path` with `changes` and the correct hashes of all files."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = {file.name: sha256(file) for file in sorted(path.iterdir()) if file.name != "manifest.json"}
    manifest = {key: value for key, value in (manifest | {"files": files} | changes).items() if value is not REMOVE_KEY}
    manifest.pop("sha256")
    seal = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": seal}))


def sealed_config(content: bytes) -> bytes:
    """Return the text of a saved config with the comment that has its SHA-256, whatever the text is."""
    text = content + b"\n"
    return text + f"# sha256 of the lines above: {hashlib.sha256(text).hexdigest()}\n".encode()


def rewrite_archive(
    source: Path,
    target: Path,
    change: Callable[[str, bytes], bytes] = lambda _, data: data,
    compression: int = 0,
    pickle_name: str = "data.pkl",
) -> None:
    """Copy the archive `source` to `target`, and replace the content of each entry by `change(name, content)`."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", compression) as out:
        for name in archive.namelist():
            out.writestr(name.replace("data.pkl", pickle_name), change(name, archive.read(name)))


def sha256(file: Path) -> str:
    """The hash of a regular file, or a dummy for any other entry, which must not be opened."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() and not file.is_symlink() else "0" * 64


def read_checkpoint_file(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return safetensors.torch.load_file(file)
    return torch.load(file, weights_only=True)


def write_checkpoint_file(file: Path, content: Any) -> None:
    """Replace the content of a file of a checkpoint, and update the manifest."""
    if file.suffix == ".safetensors":
        safetensors.torch.save_file(content, file)
    else:
        torch.save(content, file)
    rewrite_manifest(file.parent)


def nested_values(content: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield every nested value of `content` with its keys."""
    if keys:
        yield keys, content
    if isinstance(content, dict | list | tuple):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from nested_values(value, (*keys, key))


def with_value_changed(content: Any, keys: Keys, change: Callable[[Any], Any]) -> Any:
    """A copy of `content`, with `change` applied to the value at `keys`."""
    if not keys:
        return change(content)
    container = list(content) if isinstance(content, list | tuple) else copy.copy(content)
    value = with_value_changed(container[keys[0]], keys[1:], change)
    if value is REMOVE_KEY:
        del container[keys[0]]
    else:
        container[keys[0]] = value
    return tuple(container) if isinstance(content, tuple) else container
