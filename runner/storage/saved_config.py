"""The config of a run as a YAML file, which is read as plain values because anybody may have written it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.renamed_classes import with_current_names
from runner.system.secrets import redacted_values

LIMIT_BYTES = 1_000_000
_DEEPEST = 20
_SEAL = "# sha256 of the lines above: "


class UnreadableConfigError(Exception):
    """Raised when a saved config is damaged, or contains anything but plain values."""


def config_text(config: dict[str, Any]) -> str:
    """Return `config` as YAML, without credentials. The last line is a comment with the SHA-256 of the lines above."""
    config = redacted_values(config)
    text = OmegaConf.to_yaml(OmegaConf.create(config))
    if not all(line.isprintable() for line in text.split("\n")):  # YAML would change these characters
        text = json.dumps(config, indent=2) + "\n"  # JSON is YAML too, and escapes them
    return f"{text}{_SEAL}{_sha256(text)}\n"


def is_sealed(content: bytes) -> bool:
    """Return whether the text of a config contains its SHA-256; configs of earlier versions do not."""
    return _SEAL.encode() in content


def parse_config(content: bytes) -> dict[str, Any]:
    """Return the plain values of a config that was written by `config_text` or by an earlier version of this project.

    Interpolations (`${…}`) are returned as text.

    Raises:
        UnreadableConfigError: if the recorded SHA-256 does not match, or the config is no mapping of plain values.
    """
    try:
        text = content.decode()
        text, seal, sha256 = text.partition(_SEAL)
        if seal and sha256.strip() != _sha256(text):
            raise UnreadableConfigError("its content does not match its SHA-256; options change on the command line")
        _check_plain(text)
        config = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        json.dumps(config, default=str)  # raises ValueError for a number of thousands of digits: 59:59:59:…
    except (UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UnreadableConfigError(str(error).splitlines()[0]) from None
    if not isinstance(config, dict):
        raise UnreadableConfigError("it is no mapping")
    if not all(isinstance(key, str) for key in _keys(config)):
        raise UnreadableConfigError("a key is no text")
    return with_current_names(config)


def _check_plain(text: str) -> None:
    """Raise an `UnreadableConfigError` if a YAML text is no mapping, is nested too deeply, or has tags or anchors."""
    depth, count = 0, 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader), start=1):
        if count == 3 and not isinstance(event, yaml.MappingStartEvent):  # after those of the stream and the document
            raise UnreadableConfigError("it is no mapping")
        if getattr(event, "tag", None) is not None:
            raise UnreadableConfigError(f"it has the tag {event.tag}")
        if getattr(event, "anchor", None) is not None:
            raise UnreadableConfigError("it has an anchor or an alias")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise UnreadableConfigError(f"it is nested more than {_DEEPEST} times")
    if count < 3:
        raise UnreadableConfigError("it is empty")


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *(key for inner in value.values() for key in _keys(inner))]
    return [key for inner in value for key in _keys(inner)] if isinstance(value, list) else []


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
