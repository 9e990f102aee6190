"""The run of overrides that were passed to a tool."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.cli import arguments as cli
from runner.cli.composition import Composer
from runner.run import Run, build_run


def compose_run(overrides: Sequence[str], config_dir: str | None = None, name: str = "run") -> Run:
    """Compose a config from overrides, and build its run.

    Args:
        overrides: the overrides of the config.
        config_dir: a directory with options of your own, with the structure of conf/; None to use only conf/.
        name: the name of the run.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if the config is refused.
    """
    words = [cli.quoted(word, sweep=False) for word in overrides]
    return build_run(Composer(config_dir).run([*words, f"name={name}"]).config)


def replaced(overrides: Sequence[str], *others: str) -> list[str]:
    """Return `overrides` without those that set the same config groups or keys as `others`, followed by `others`.

    For example, `parallel=single` in `others` removes `parallel=pipeline` and `parallel.stages=4` from `overrides`.
    """
    groups = {text.partition("=")[0] for text in others}
    kept = [text for text in overrides if re.split(r"[=.@]", text.lstrip("+~"))[0] not in groups]
    return [*kept, *others]
