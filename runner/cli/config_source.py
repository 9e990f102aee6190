"""The folders from which Hydra reads option files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource

from runner.config.errors import ABSENT, check
from runner.config.yaml_file import read_config


class OptionFiles(FileConfigSource):
    """A folder of option files, such as conf/. The files are checked when they are read (see `read_config`)."""

    sets_hydra: ClassVar[bool] = False
    """Whether any file that was read may set keys of Hydra. References to such keys (`${hydra:…}`) do not count.

    This is an attribute of the class, because Hydra copies the instances before it uses them.
    """

    @staticmethod
    def scheme() -> str:
        return "conf"

    is_constant: ClassVar[bool] = True
    """Whether the defaults lists that were read contain no references, which Hydra resolves while it composes.

    For example, with `model: ${oc.env:MODEL}`, an environment variable determines which option is chosen.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of an option file.

        Raises:
            ConfigError: if the file cannot be read, is not plain YAML, or has a key `hydra` that is not a mapping.
            ConfigLoadError: if the file does not exist.
        """
        path = self._path(config_path)
        if not path.exists():
            raise ConfigLoadError(f"Config not found : {path}")
        content = read_config(path)
        hydra = content.get("hydra", {})
        why, remedy = f"it is not a mapping ({os.path.relpath(path)})", "write hydra: {sweeper: {params: …}}"
        check(isinstance(hydra, Mapping), "hydra", hydra, why, remedy)
        text = path.read_text(encoding="utf-8")
        header = ConfigSource._get_header_dict(text[:512])
        own = text.replace("${hydra:", "")
        OptionFiles.sets_hydra |= "hydra" in own or "\\" in own  # an escape sequence may stand for any letter
        OptionFiles.is_constant &= "${" not in str(content._get_node("defaults"))
        return ConfigResult(
            config=content, path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header
        )

    def is_config(self, config_path: str) -> bool:
        """Return whether the option file exists.

        Raises:
            ConfigError: if the path is a directory, which Hydra would ignore silently.
        """
        path = self._path(config_path)
        remedy = "remove it, or give it another name"
        check(not path.is_dir(), os.path.relpath(path), ABSENT, "an option is a file, this is a directory", remedy)
        return super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of options for shell completion.

        Files whose names begin with `_`, such as `_processes`, are left out: they are not options, but hold the keys
        that several options inherit.
        """
        return [name for name in super().list(config_path, results_filter) if not name.startswith("_")]

    def _path(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))
