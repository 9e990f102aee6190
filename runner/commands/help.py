"""The text of `--help`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.commands import COMMANDS
from runner.config.options import CONF, description, option_files
from runner.config.overrides import override_key

_KEY = re.compile(r" *[\w.]+: .*#")


def help_text(config_dir: str | None = None, words: Sequence[str] = ()) -> str:
    """Return the help text: the subcommands, every config group with its options, and every root key.

    Args:
        config_dir: the directory of `--config-dir`, whose options are also listed; None if the flag was not typed.
        words: the command line. The keys of the options that it chooses are also listed.
    """
    files = option_files(*([Path(os.path.expanduser(config_dir))] if config_dir else []))
    lines = [
        "python -m runner [GROUP=OPTION …] [KEY=VALUE …]     train one run",
        "python -m runner -m [GROUP=OPTION,OPTION …]         sweep: one run for each combination",
        "",
        *(f"python -m runner {name:<10} {what}" for name, what in COMMANDS.items()),
        "",
        "The config changes how the work is done, never what is computed.",
        "",
    ]
    for word in words:
        group, option = override_key(word), word.partition("=")[2]
        if path := files.get(group, {}).get(option):
            lines += [f"{group}={option}: {description(path)}", *(f"  {line}" for line in _keys(path)), ""]
    for group, options in files.items():
        lines.append(f"{group}=")
        lines += [f"  {option:<14} {description(path)}" for option, path in options.items()]
    return "\n".join(
        [
            *lines,
            "",
            "keys:",
            *(f"  {line}" for line in _keys(CONF / "config.yaml")),
            "",
            "GROUP=OPTION --help also lists the keys of the option",
            "--summary prints a table of the network, and trains nothing",
            "--run-directory DIR trains in DIR, not in a new directory in output_root",
            "--cfg job prints the composed config",
            "--config-dir DIR adds your own options · --version",
        ]
    )


def _keys(path: Path) -> Iterator[str]:
    """Yield the lines of an option file with a key and its comment, after those of the files that it inherits."""
    text = path.read_text(encoding="utf-8")
    defaults = re.search(r"^defaults:(?: \[.*\]|(?:\n  - .*)+)", text, re.MULTILINE)
    for name in re.findall(r"(?<=[-,\[]) ?(\w+)(?:@\w+)?(?=[],\n]|$)", defaults[0] if defaults else ""):
        inherited = path.with_name(f"{name}.yaml")
        if name != "_self_" and inherited.exists():
            yield from _keys(inherited)
    yield from (line.rstrip() for line in text.splitlines() if _KEY.match(line))
