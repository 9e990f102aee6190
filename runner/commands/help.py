"""The text of `--help`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from runner.commands import COMMANDS
from runner.config.errors import ABSENT, check, did_you_mean
from runner.config.options import CONF, description, option_files
from runner.config.overrides import override_key

_KEY = re.compile(r" *[\w.]+: .*#")


def help_text(config_dir: str | None = None, words: Sequence[str] = ()) -> str:
    """Return the help text: the subcommands, every config group with its options, and every root key.

    Args:
        config_dir: the directory of `--config-dir`, whose options are also listed; None if the flag was not typed.
        words: the command line without its flags. If it names keys, groups or options, only these are explained.

    Raises:
        ConfigError: if there is no such key.
    """
    files = option_files(*([Path(os.path.expanduser(config_dir))] if config_dir else []))
    if asked := [word for word in words if not word.startswith("-")]:
        chosen = {override_key(word): word.partition("=")[2] for word in asked}
        found = [line for word in asked for line in _explained(override_key(word), files, chosen)]
        return "\n".join([*found, "python -m runner --help lists all groups, options and keys of the root config"])
    lines = [
        "python -m runner [GROUP=OPTION …] [KEY=VALUE …]     train one run",
        "python -m runner -m [GROUP=OPTION,OPTION …]         sweep: one run for each combination",
        "",
        *(f"python -m runner {name:<10} {what}" for name, what in COMMANDS.items()),
        "",
        "The config changes how the work is done, never what is computed.",
        "",
    ]
    for group, options in files.items():
        lines += _listed(group, options)
    return "\n".join(
        [
            *lines,
            "",
            "keys:",
            *(f"  {line}" for line in _keys(CONF / "config.yaml")),
            "",
            "GROUP=OPTION --help lists the keys of the option, and KEY --help explains a key",
            "--summary prints a table of the network, and trains nothing",
            "--run-directory DIR trains in DIR, not in a new directory in output_root",
            "--cfg job prints the composed config",
            "--config-dir DIR adds your own options · --version",
        ]
    )


def _listed(group: str, options: Mapping[str, Path]) -> list[str]:
    return [f"{group}=", *(f"  {option:<14} {description(path)}" for option, path in options.items())]


def _explained(key: str, files: Mapping[str, Mapping[str, Path]], chosen: Mapping[str, str]) -> Iterator[str]:
    """Yield lines that explain a group or the option of it in `chosen`, or a key in each option that has it."""
    group, _, name = key.partition(".")
    root = {line.partition(":")[0]: line for line in _keys(CONF / "config.yaml")}
    options = files.get(group, {})
    typed = options.get(chosen.get(group, ""))
    if key in files and typed:
        yield from (f"{key}={chosen[key]}: {description(typed)}", *(f"  {line}" for line in _keys(typed)), "")
    elif key in files:
        yield from (*_listed(key, options), "", f"{key}=OPTION --help lists the keys of an option", "")
    elif key in root:
        yield from (root[key], "")
    else:
        lines: dict[str, list[str]] = {}
        known: set[str] = set()
        for option, path in options.items():
            of_option = {line.partition(":")[0].strip(): line.strip() for line in _keys(path)}
            known |= of_option.keys()
            if name.partition(".")[0] in of_option and typed in (None, path):
                lines.setdefault(of_option[name.partition(".")[0]], []).append(option)
        names = {*root, *files, *(f"{group}.{each}" for each in known)}
        check(bool(lines), key, ABSENT, "there is no such key;", did_you_mean(key, names))
        for line, those in lines.items():
            yield from (f"{group}.{line}", f"  {group}={', '.join(those)}")
        yield ""


def _keys(path: Path) -> Iterator[str]:
    """Yield the lines of an option file with a key and its comment, and those that it inherits."""
    found: dict[str, str] = {}
    text = path.read_text(encoding="utf-8")
    defaults = re.search(r"^defaults:(?: \[.*\]|(?:\n  - .*)+)", text, re.MULTILINE)
    for name in re.findall(r"(?<=[-,\[]) ?(\w+)(?:@\w+)?(?=[],\n]|$)", defaults[0] if defaults else ""):
        inherited = path.with_name(f"{name}.yaml")
        if name != "_self_" and inherited.exists():
            found |= {line.partition(":")[0]: line for line in _keys(inherited)}
    found |= {line.partition(":")[0]: line.rstrip() for line in text.splitlines() if _KEY.match(line)}
    yield from found.values()
