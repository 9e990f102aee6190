"""The source from which Hydra reads option files, which are checked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from runner.config.errors import ABSENT, check
from runner.config.options import CONF
from runner.config.overrides import HYDRA_KEYS
from runner.config.yaml_file import read_config


class OptionFiles(ConfigSource):
    """A folder of option files, such as conf/. The files are checked when they are read (see `read_config`)."""

    looked_up: ClassVar[set[Path]] = set()
    """The paths at which files were looked for."""

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
        entries, of_hydra = values.get("defaults") or [], values.get("hydra")
        why, remedy = f"in {os.path.relpath(path)}, it is not a list", "begin each entry with - in a line of its own"
        check(isinstance(entries, list), "defaults", entries, why, remedy)
        groups = [group for entry in entries if isinstance(entry, dict) for group in entry]
        keys = [str(name).rpartition(" ")[2].lstrip("/") for name in (*groups, header.get("package") or "")]
        keys += ["hydra"] if not isinstance(of_hydra, dict | None) else []
        for key, value in of_hydra.items() if isinstance(of_hydra, dict) else ():
            is_study = key == "sweeper" and isinstance(value, dict) and {*value} == {"params"}
            if key not in HYDRA_KEYS and not is_study:
                keys.append(f"hydra.{key}")
        for key in keys if path != CONF / "config.yaml" else ():
            why = f"{os.path.relpath(path)} sets this key of Hydra, which only composes the config here"
            check(not re.match(r"hydra\b", key), key, ABSENT, why, f"only {', '.join(HYDRA_KEYS)} have an effect")
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
        path = Path(self.path, self._normalize_file_name(config_path))
        self.looked_up.add(path)
        return path


def modified(path: Path) -> int:
    """Return when a file was modified, in ns; -1 if there is none."""
    return path.stat().st_mtime_ns if path.exists() else -1
