"""Functions that check the overrides on a tool's command line, and that build a run from overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.cli import arguments as cli
from runner.cli.composition import Composer
from runner.commands.run_arguments import check_no_flags
from runner.config.errors import check

if TYPE_CHECKING:
    from runner.run import Run


def overrides_of(
    words: Sequence[str], flags: str, instead_of_resume: str = "leave it out, and repeat the run's overrides"
) -> list[str]:
    """Check that `words` are overrides, and return them.

    Args:
        words: the words of a command line that are not the tool's own flags.
        flags: the tool's flags, for the error message.
        instead_of_resume: what to type instead of `resume=RUN`, for the error message.

    Raises:
        ConfigError: for an unknown flag, a word that is not a valid override, or a value of `resume` other than `auto`
            and `never`.
    """
    check_no_flags(words, f"it takes {flags} and overrides")
    overrides = cli.overrides_first(words)
    resumed = cli.override_value(overrides, "resume")
    why = "this tool composes a config, and does not resume a run"
    check(resumed in (None, "auto", "never"), "resume", resumed, why, instead_of_resume)
    return overrides


def compose_run(overrides: Sequence[str], config_dir: str | None = None, name: str = "run") -> Run:
    """Compose a config from overrides, and build its run.

    Args:
        overrides: the overrides of the config.
        config_dir: a directory with options of your own, with the structure of conf/; None to use only conf/.
        name: the name of the run.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: if the config is refused.
    """
    from runner.run import build_run  # imported here: flags are checked before torch is imported

    words = [cli.quoted(word, sweep=False) for word in overrides]
    return build_run(Composer(config_dir).run([*words, f"name={name}"]).config)


def replaced(overrides: Sequence[str], *others: str) -> list[str]:
    """Return `overrides` without the items that `others` replace, followed by `others`.

    An item of `others` whose key contains no dot, such as `parallel=single`, replaces all overrides of its config group
    or key, for example `parallel=pipeline` and `parallel.stages=4`. An item of `others` whose key contains a dot, such
    as `parallel.stages=2`, replaces nothing.
    """
    groups = {text.partition("=")[0] for text in others}
    kept = [text for text in overrides if re.split(r"[=.@]", text.lstrip("+~"))[0] not in groups]
    return [*kept, *others]
