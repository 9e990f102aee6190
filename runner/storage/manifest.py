"""The manifest of a checkpoint: the SHA-256 of each file and of itself, verified before a file is deserialized."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError

NAME = "manifest.json"
SCHEMA = 2

_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""Error numbers that mean a damaged checkpoint; others (missing permission or memory) do not."""


class DamagedError(Exception):
    """A file of a checkpoint is missing, or differs from what was written."""


def manifest_of(directory: Path, **facts: Any) -> str:
    """Return the text of a manifest.

    Args:
        directory: the checkpoint, all of whose files are hashed.
        facts: further keys and values.
    """
    files = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    manifest = {"schema": SCHEMA, **facts, "files": files}
    return json.dumps(manifest | {"sha256": _seal(manifest)}, indent=2) + "\n"


def verified_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest in `directory`, after verifying the hashes of the files that it lists.

    Raises:
        DamagedError: if a file is missing or its hash differs.
        ConfigError: if it was written by an incompatible version of this project.
        OSError: if a file cannot be read for another reason.
    """
    try:
        manifest = _read(directory / NAME)
        if manifest.get("schema") != SCHEMA:
            why = f"it has schema {manifest.get('schema')}, this version reads {SCHEMA}"
            raise ConfigError("resume", str(directory), why, "resume with the version that wrote it")
        for name, sha256 in manifest["files"].items():
            if _sha256(directory / name) != sha256:
                raise DamagedError(f"{directory / name} is damaged: its SHA-256 is not the manifest's")
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise DamagedError(f"{directory} is damaged: {error.filename}: {error.strerror}") from None
    return manifest


def _read(path: Path) -> dict[str, Any]:
    """Read a manifest and verify its own SHA-256, which is computed in the same way in every schema."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        seal = manifest.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error!r}") from None
    if seal != _seal(manifest):
        raise DamagedError(f"{path} is damaged: its content does not match its SHA-256")
    return manifest


def _seal(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own hash."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
