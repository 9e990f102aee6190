"""The config of a run as a YAML file. Only plain values are read, because the file's source may be untrusted."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from functools import cache, lru_cache
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from runner.config.added_groups import with_added_groups
from runner.config.renamed_classes import with_current_names
from runner.system.secrets import redacted_values
from runner.system.utf8 import printable

_DEEPEST, _MOST_EVENTS = 20, 10_000
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxX_.:+-]{1000}")
"""The beginning of a number so long that PyYAML may need minutes: its time for 59:59:59:… is quadratic."""
_MOST_REFERRING = 3_000
"""Limit of the total characters of all texts with references (`${…}`). OmegaConf parses 4,000 characters per second."""
_SEAL = "# sha256 of the lines above: "


class UnreadableConfigError(Exception):
    """Raised when a saved config is damaged, or contains anything other than plain values."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may quote the file


def config_text(config: dict[str, Any]) -> str:
    """Return `config` as YAML, without credentials. The last line is a comment with the SHA-256 of the lines above."""
    text = config_yaml(config)
    if not all(line.isprintable() for line in text.split("\n")):  # YAML would change these characters
        text = json.dumps(redacted_values(config), indent=2) + "\n"  # JSON is YAML too, and escapes them
    return f"{text}{_SEAL}{_sha256(text)}\n"


def config_yaml(config: dict[str, Any]) -> str:
    """Return `config` as YAML, without credentials, for people to read."""
    return _yaml(pickle.dumps(redacted_values(config)))


@lru_cache(maxsize=8)
def _yaml(config: bytes) -> str:
    """Return a pickled config as YAML. Cached, because each run needs the YAML three times, and it takes 20 ms."""
    return OmegaConf.to_yaml(OmegaConf.create(pickle.loads(config)))


def is_sealed(content: bytes) -> bool:
    """Return whether the text of a config contains its SHA-256; earlier versions of this project did not write it."""
    return _SEAL.encode() in content


def parse_config(content: bytes) -> dict[str, Any]:
    """Return the plain values of a config that was written by `config_text` or by an earlier version of this project.

    Interpolations (`${…}`) are not resolved. Old names of classes are replaced, and config groups that an earlier
    version did not have are added.

    Raises:
        UnreadableConfigError: if the recorded SHA-256 does not match, or the config is not a mapping of plain values.
    """
    try:
        text = content.decode()
        text, seal, sha256 = text.partition(_SEAL)
        if seal and sha256.strip() != _sha256(text):
            raise UnreadableConfigError("its content does not match its SHA-256; options change on the command line")
    except UnicodeDecodeError as error:
        raise UnreadableConfigError(str(error)) from None
    config = plain_values(text, yaml.MappingStartEvent)
    if not all(isinstance(key, str) for key in _keys(config)):
        raise UnreadableConfigError("a key is not a text")
    return with_added_groups(with_current_names(config))


def plain_values(text: str, root: type[yaml.CollectionStartEvent]) -> Any:
    """Return the plain values in a YAML text. Interpolations (`${…}`) are not resolved.

    Args:
        text: the YAML text.
        root: the type of the outermost collection: `yaml.MappingStartEvent` or `yaml.SequenceStartEvent`.

    Raises:
        UnreadableConfigError: if the text is not a collection of type `root`, contains anything other than plain
            values, or would take unusually long to parse.
    """
    try:
        loader = _loader()(text, root)
        try:
            values = loader.get_single_data()
        finally:
            loader.dispose()
        if loader.num_events < 3:
            raise UnreadableConfigError("it is empty")
        if loader.num_referring > _MOST_REFERRING:
            raise UnreadableConfigError(f"its references have more than {_MOST_REFERRING:,} characters")
        if loader.num_referring:
            OmegaConf.create(values)  # parses each reference
        return values
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OverflowError) as error:
        raise UnreadableConfigError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise UnreadableConfigError("an interpolation in it is nested too deeply") from None


@cache
def _loader() -> Any:
    """Return a class that loads YAML as OmegaConf does, and checks each event of the parser before using the event."""

    class Loader(get_yaml_loader()):
        def __init__(self, text: str, root: type[yaml.CollectionStartEvent]):
            super().__init__(text)
            self.root, self.num_events, self.depth = root, 0, 0
            self.num_referring = 0  # characters of texts with references

        def get_event(self) -> yaml.Event:
            event = super().get_event()
            self.num_events += 1
            self.depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            _check_plain(event, self.num_events, self.depth, self.root)
            if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
                self.num_referring += len(event.value)
            return event

    return Loader


def _check_plain(event: yaml.Event, number: int, depth: int, root: type[yaml.CollectionStartEvent]) -> None:
    """Check an event of the YAML parser, so that only plain values that are quick to read are accepted.

    The text must be a collection of type `root`. It may have no tags, anchors or aliases, and no very long numbers. The
    depth of nested collections and the number of events are limited.

    Args:
        event: the event.
        number: the number of the event in the text, counted from 1.
        depth: the number of collections that have begun and not ended.
        root: the type of the outermost collection.

    Raises:
        UnreadableConfigError: if the check fails.
    """
    if number == 3 and not isinstance(event, root):  # after those of the stream and the document
        raise UnreadableConfigError(f"it is not a {'mapping' if root is yaml.MappingStartEvent else 'list'}")
    if (tag := getattr(event, "tag", None)) is not None:
        raise UnreadableConfigError(f"it has the tag {tag}")
    if getattr(event, "anchor", None) is not None:
        raise UnreadableConfigError("it has an anchor or an alias")
    if isinstance(event, yaml.ScalarEvent) and not event.style and _LONG_NUMBER.match(event.value):
        raise UnreadableConfigError("it has a number of more than a thousand digits")
    if depth > _DEEPEST:
        raise UnreadableConfigError(f"it is nested more than {_DEEPEST} times")
    if number > _MOST_EVENTS:
        raise UnreadableConfigError(f"it has more than {_MOST_EVENTS:,} keys and values")


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *(key for inner in value.values() for key in _keys(inner))]
    return [key for inner in value for key in _keys(inner)] if isinstance(value, list) else []


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
