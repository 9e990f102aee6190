"""The text of `--help`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from runner.commands import COMMANDS
from runner.config.options import CONF, description, option_files


def help_text(config_dir: str | None = None) -> str:
    """Return the help text: every config group with its options and their descriptions, and every root key.

    Args:
        config_dir: the directory of `--config-dir`, whose options are also listed; None if the flag was not typed.
    """
    lines = [
        "python -m runner [GROUP=OPTION …] [KEY=VALUE …]     train one run",
        "python -m runner -m [GROUP=OPTION,OPTION …]         sweep: one run for each combination",
        "",
        *(f"python -m runner {name:<10} {what}" for name, what in COMMANDS.items()),
        "",
        "The config changes how the work is done, never what is computed.",
        "",
    ]
    more = [Path(os.path.expanduser(config_dir))] if config_dir else []
    for group, files in option_files(*more).items():
        lines.append(f"{group}=")
        lines += [f"  {option:<14} {description(file)}" for option, file in files.items()]
    lines += ["", "keys:"]
    root = (CONF / "config.yaml").read_text(encoding="utf-8").splitlines()
    lines += [f"  {line.rstrip()}" for line in root if re.match(r"[a-z_]+: .*#", line)]
    lines += [
        "",
        "--summary prints a table of the network, and trains nothing",
        "--run-directory DIR trains in DIR, not in a new directory in output_root",
        "--cfg job prints the composed config · --config-dir DIR adds your own options · --version",
        "--hydra-help describes --info, --multirun and all other flags",
    ]
    return "\n".join(lines)
