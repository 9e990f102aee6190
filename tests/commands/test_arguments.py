"""Tests of `runner.commands.arguments`: the command and its subcommands parse their flags in the same way."""

import importlib

import pytest

from runner.commands import COMMANDS
from runner.commands.arguments import Parser, command
from runner.config.errors import ABSENT, ConfigError


def parser() -> Parser:
    made = Parser("evaluate", "Evaluates.", overrides=True)
    made.add_run()
    made.add_argument("--json", action="store_true")
    return made


@pytest.mark.cases(
    ["out/a", "seed=1", "~debug", "--json", "--checkpoint", "7"],
    ["--json", "out/a", "--checkpoint=7", "seed=1", "~debug"],
    ["--checkpoint", "7", "out/a", "seed=1", "--json", "~debug"],
)
def test_flags_may_stand_anywhere(words):
    options = parser().parsed(words)
    assert (options.run, options.overrides) == ("out/a", ["seed=1", "~debug"])
    assert (options.json, options.checkpoint, options.config_dir) == (True, "7", None)


@pytest.mark.cases(
    (["out/a", "--jsn"], "--jsn", "did you mean --json?"),
    (["out/a", "--nope=3"], "--nope", "choose from: --checkpoint, --config-dir, --help, --json"),
    (["out/a", "--seed=1"], "--seed", "without dashes: seed=1"),
    (["out/a", "--name=a b"], "--name", "without dashes: 'name=a b'"),
    (["out/a", "--lr", "1"], "--lr", "type optimizer.lr=…"),
    ([], "the following arguments are required", "python -m runner evaluate --help explains it"),
)
def test_a_mistake_is_refused_with_a_suggestion(words, key, remedy):
    with pytest.raises(ConfigError) as refusal:
        parser().parsed(words)
    assert (refusal.value.key, refusal.value.got, refusal.value.remedy) == (key, ABSENT, remedy)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_refuses_an_unknown_flag_and_has_a_help(name, capsys):
    main = importlib.import_module(f"runner.commands.{name}").main
    assert main(["--sumary", "x"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "--sumary: there is no such flag;"
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert (end.value.code, capsys.readouterr().out.startswith(f"usage: python -m runner {name}")) == (0, True)


@pytest.mark.cases(
    (ConfigError("data.token", "s3cret", "it is too short", "data.token=TOKEN"), 2, "data.token: got '***': it is"),
    (OSError("https://ann:s3cret@host/x: no answer"), 1, "OSError: https://ann:***@host/x: no answer"),
    (KeyboardInterrupt("s3cret"), 130, "interrupted"),
)
def test_an_error_of_a_subcommand_is_its_exit_code_and_is_printed_without_secrets(error, code, words, capsys):
    @command
    def main(arguments: object) -> int:
        raise error

    assert main([]) == code
    said = capsys.readouterr().err
    assert words in said
    assert "s3cret" not in said


def test_a_subcommand_of_which_several_processes_are_started_is_refused(monkeypatch):
    found = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here"}
    for name, value in {**found, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="evaluate: torchrun or SLURM has started several processes of it"):
        parser().parsed(["out/a"])
