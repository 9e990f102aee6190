"""The config of a run as a YAML file. Only plain values are read, because the file's source may be untrusted."""

from __future__ import annotations

import hashlib
from typing import Any

from runner.config.errors import ConfigError
from runner.config.yaml_file import plain_values, yaml_text
from runner.system.secrets import redacted_values
from runner.system.utf8 import printable

_SEAL = "# sha256 of the lines above: "


class UnreadableConfigError(Exception):
    """Raised when a saved config is damaged, or contains anything other than plain values."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may quote the file


def config_text(config: dict[str, Any]) -> str:
    """Return `config` as YAML, without credentials. The last line is a comment with the SHA-256 of the lines above."""
    text = config_yaml(config)
    return f"{text}{_SEAL}{_sha256(text)}\n"


def config_yaml(config: dict[str, Any]) -> str:
    """Return `config` as YAML, without credentials, for people to read."""
    return yaml_text(redacted_values(config))


def is_sealed(content: bytes) -> bool:
    """Return whether the text of a config contains its SHA-256, as every config of a run does."""
    return _SEAL.encode() in content


def parse_config(content: bytes) -> dict[str, Any]:
    """Return the plain values of a config that was written by `config_text`, with references (`${…}`) as texts.

    Raises:
        UnreadableConfigError: if the SHA-256 does not match, or the config is not a mapping of plain values.
    """
    text, seal, sha256 = _text(content).partition(_SEAL)
    if not seal or sha256.strip() != _sha256(text):
        raise UnreadableConfigError("its content does not match its SHA-256; options change on the command line")
    return _values(text, dict)


def parse_list(content: bytes) -> list[Any]:
    """Return the plain values in a YAML list.

    Raises:
        UnreadableConfigError: if it is not a list of plain values.
    """
    return _values(_text(content), list)


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UnreadableConfigError(str(error)) from None


def _values(text: str, kind: type) -> Any:
    try:
        values = plain_values(text, "file", anchors=False)
    except ConfigError as error:
        raise UnreadableConfigError(f"{error.key}: {error.why}") from None
    if not isinstance(values, kind):
        raise UnreadableConfigError(f"it is not a {kind.__name__}")
    return values


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
