"""The manifest of a checkpoint: the SHA-256 of each of its files and of itself, which are verified before loading."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner.config.errors import ConfigError, check, shortened
from runner.storage.files import UnsafeFileError, check_no_link, open_regular, read_regular
from runner.storage.run_directory import MAX_BYTES, step_of

MANIFEST = "manifest.json"
SCHEMA = 2

_MAX_BYTES = 2**24
"""Size limit of a manifest in bytes; enough for a manifest with the files of 100,000 ranks."""

_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""The numbers of the OSErrors that show that a checkpoint is damaged. A missing permission, for example, does not."""


class DamagedError(Exception):
    """Raised when a file of a checkpoint is missing, or its content is not what was written."""


def manifest_of(directory: Path, known: Mapping[str, str], **facts: Any) -> str:
    """Return the text of a manifest with `facts` and the hashes of all files in `directory`, except those `known`."""
    files = {path.name: known.get(path.name) or _sha256(path) for path in sorted(directory.iterdir())}
    manifest = {"schema": SCHEMA, **facts, "files": files}
    return json.dumps(manifest | {"sha256": _seal(manifest)}, indent=2) + "\n"


def verified_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest in `directory`, a dict, after verifying the hashes of the files that it lists.

    Its keys are `schema`, `files` (a dict from file name to SHA-256), `world_size`, `step`, and `best`, an evaluation.

    Raises:
        DamagedError: if the manifest or a listed file is missing, or does not match its hash.
        ConfigError: if the checkpoint was written by an incompatible version of this project, or by something else.
        OSError: if a file cannot be read for another reason.
    """
    with _refusals(directory):
        manifest = read_manifest(directory)
        for name, sha256 in manifest["files"].items():
            _verify(directory / name, _sha256(directory / name), sha256)
    return manifest


def hashes_of_shared(directory: Path, other: Path) -> dict[str, str]:
    """Return the hashes, by name, of the files in `directory` that are those of the checkpoint `other`, by hard links.

    They are taken from the manifest of `other`, whose hashes were verified when it was loaded, or computed when it was
    written. If it cannot be read, the result is empty.
    """
    with suppress(DamagedError, ConfigError, OSError):
        listed, names = read_manifest(other)["files"], {path.name for path in directory.iterdir()}
        return {name: listed[name] for name in names & listed.keys() if (directory / name).samefile(other / name)}
    return {}


def saved_text(directory: Path, name: str) -> str | None:
    """Return the content of a text file in a checkpoint; None if the checkpoint was written without this file.

    Only the hashes of the manifest and of this file are verified.

    Raises:
        DamagedError, ConfigError, OSError: as in `verified_manifest`.
    """
    with _refusals(directory):
        sha256 = read_manifest(directory)["files"].get(name)
        if sha256 is None:
            return None
        content = read_regular(directory / name, MAX_BYTES)
        _verify(directory / name, hashlib.sha256(content).hexdigest(), sha256)
    return content.decode(errors="replace")


def untrusted(directory: Path, why: str) -> ConfigError:
    """Return a ConfigError saying that the checkpoint in `directory` cannot be trusted, with the reason `why`."""
    remedy = "no run writes such a checkpoint: do not trust it, and resume another one"
    return ConfigError("resume", str(directory), why, remedy)


@contextmanager
def _refusals(directory: Path) -> Iterator[None]:
    try:
        yield
    except UnsafeFileError as error:
        raise untrusted(directory, f"{error.filename}: {error.strerror}") from None
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise DamagedError(f"{directory} is damaged: {error.filename}: {error.strerror}") from None


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return what `verified_manifest` returns, after verifying only the hash of the manifest itself."""
    check_no_link(directory)
    path = directory / MANIFEST
    try:
        manifest = json.loads(read_regular(path, _MAX_BYTES).decode())
        intact = manifest.pop("sha256") == _seal(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {type(error).__name__}: {shortened(str(error), 200)}") from None
    if not intact:
        raise DamagedError(f"{path} is damaged: its content does not match its SHA-256")
    why = f"it has schema {reprlib.repr(manifest.get('schema'))}, this version reads {SCHEMA}"
    check(manifest.get("schema") == SCHEMA, "resume", str(directory), why, "resume with the version that wrote it")
    step, world_size, files = (manifest.get(key) for key in ("step", "world_size", "files"))
    valid = {  # a correct hash is not enough, because anybody can compute a hash
        "step": type(step) is int and step >= 0 and step_of(directory) in (step, None),
        "world_size": type(world_size) is int and world_size >= 1,
        "files": isinstance(files, dict) and all(re.fullmatch(r"\w[\w.-]{0,250}", name, re.ASCII) for name in files),
    }
    for key in [key for key, ok in valid.items() if not ok]:
        raise untrusted(directory, f"{MANIFEST} has a wrong value of {key}: {reprlib.repr(manifest.get(key))}")
    return manifest


def _verify(path: Path, sha256: str, wanted: object) -> None:
    if sha256 != wanted:
        raise DamagedError(f"{path} is damaged: its SHA-256 is not the manifest's")


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
