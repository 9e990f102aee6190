"""Functions of the subcommands that compose a config and build its run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.config.composition import Composer

if TYPE_CHECKING:
    from runner.run import Run


def compose_run(overrides: Sequence[str], config_dir: str | None = None, name: str = "run") -> Run:
    """Compose a config from overrides, and build its run."""
    from runner.run import build_run

    return build_run(Composer(config_dir).run([*overrides, f"name={name}"]).config)


def replaced(overrides: Sequence[str], *others: str) -> list[str]:
    """Return `overrides` followed by `others`, which replace overrides of the same group: `parallel=single` all of
    `parallel`, but `parallel.stages=2` none.
    """
    groups = {text.partition("=")[0] for text in others}
    kept = [text for text in overrides if re.split(r"[=.@]", text.lstrip("+~"))[0] not in groups]
    return [*kept, *others]
