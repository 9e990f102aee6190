"""Functions of the subcommands that compose a config and build its run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.config.composition import Composer

if TYPE_CHECKING:
    from runner.run import Run


def compose_run(overrides: Sequence[str], config_dir: str | None = None, name: str = "run") -> Run:
    """Compose a config from overrides, and build its run.

    Args:
        overrides: the overrides of the config.
        config_dir: a directory with options of your own, with the structure of conf/; None to use only conf/.
        name: the name of the run.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if the config is refused.
    """
    from runner.run import build_run

    return build_run(Composer(config_dir).run([*overrides, f"name={name}"]).config)


def replaced(overrides: Sequence[str], *others: str) -> list[str]:
    """Return `overrides` without the items that `others` replace, followed by `others`.

    An item of `others` whose key contains no dot, such as `parallel=single`, replaces all overrides of its config group
    or key, for example `parallel=pipeline` and `parallel.stages=4`. An item of `others` whose key contains a dot, such
    as `parallel.stages=2`, replaces nothing.
    """
    groups = {text.partition("=")[0] for text in others}
    kept = [text for text in overrides if re.split(r"[=.@]", text.lstrip("+~"))[0] not in groups]
    return [*kept, *others]
