"""The folders from which Hydra reads option files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from runner.config.errors import ABSENT, ConfigError
from runner.config.overrides import HYDRA_KEYS
from runner.config.yaml_file import read_config


class OptionFiles(ConfigSource):
    """A folder of option files, such as conf/. The files are checked when they are read (see `read_config`)."""

    @staticmethod
    def scheme() -> str:
        return "conf"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of an option file.

        Raises:
            ConfigError: if the file cannot be read, is not plain YAML, or sets a key of Hydra that has no effect.
            ConfigLoadError: if the file does not exist.
        """
        path = self._path(config_path)
        if not os.path.exists(path):
            raise ConfigLoadError(f"Config not found : {path}")
        content = read_config(path)
        header = self._get_header_dict(path.read_text(encoding="utf-8")[:512])
        values: Any = OmegaConf.to_container(content)
        groups = [group for entry in values.get("defaults") or [] if isinstance(entry, dict) for group in entry]
        keys = [str(name).rpartition(" ")[2].lstrip("/") for name in (*groups, header.get("package") or "")]
        for key, value in (values.get("hydra") or {}).items():
            if key not in HYDRA_KEYS and (key != "sweeper" or {*value} != {"params"}):
                keys.append(f"hydra.{key}")
        for key in keys:
            if re.match(r"hydra\b", key):
                why = f"{os.path.relpath(path)} sets this key of Hydra, which only composes the config here"
                raise ConfigError(key, ABSENT, why, f"only {', '.join(HYDRA_KEYS)} have an effect")
        return ConfigResult(self.provider, self.full_path(), content, header)

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return os.path.isdir(Path(self.path, config_path))

    def is_config(self, config_path: str) -> bool:
        return os.path.isfile(self._path(config_path))  # False for a name that is too long

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of options, without those that several options inherit (`_NAME`)."""
        return sorted(path.stem for path in Path(self.path, config_path).glob("[!_]*.yaml"))

    def _path(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))
