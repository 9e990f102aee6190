"""Tests of `table_of`, the table of a network that `--summary` prints."""

import re

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run

from runner.commands.train import main as run_command
from runner.models.blocks import table_of
from runner.models.gpt import GPT


def cells(model: torch.nn.Module, shape: tuple[int, ...] | None) -> list[list[str]]:
    return [re.split("  +", line) for line in table_of(model, shape)[0].splitlines()]


class Counting(torch.nn.Module):
    """A network without blocks that counts its calls, calls one of its children, and fails for other than 3 inputs."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = torch.nn.ModuleList([torch.nn.Linear(3, 4)]), torch.nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers[0](x)


def test_a_network_without_blocks_has_a_row_for_each_child_and_does_not_change():
    model = Counting()
    model.unused.eval()
    unknown = [["layers", "ModuleList", "–", "16", "16", "–"], ["unused", "BatchNorm1d", "–", "6", "6", "–"]]
    assert cells(model, (3,))[1:] == [*unknown, ["total", "Counting", "4", "22", "22", "24"]]
    for shape in (None, (4,)):
        assert cells(model, shape)[1:] == [*unknown, ["total", "Counting", "–", "22", "22", "–"]]
    assert (model.calls, model.training, model.unused.training) == (0, True, False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_language_model_is_shown_with_outputs_and_operations_of_its_attention(device):
    with torch.device(device):
        model = GPT(30, 8, layers=1, width=16, heads=4, kv_heads=2)
    layer = (
        2 * 8 * 16 * (16 + 2 * 8 + 16 + 2 * 4 * 16) + 4 * 8 * 8 * 16
    )  # a token has a product with all others, if masked
    head = 2 * 8 * 16 * 30
    _, stem, *others = cells(model, (8,))
    assert stem == ["stem", "Stem", "8×16", "480", "480", "0"]
    assert [row[2::3] for row in others] == [
        ["8×16", f"{layer:,}"],
        ["8×30", f"{head:,}"],
        ["8×30", f"{layer + head:,}"],
    ]


@pytest.mark.parametrize("words", [TINY_CPU, ("workload=dqn",)], ids=["classifier", "dqn"])
def test_the_command_prints_the_table_and_writes_no_files(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command([*words, "--summary"]) == 0
    printed = capsys.readouterr().out
    run = build_composed_run(*words)
    run.workload.prepare()
    trained = sum(p.numel() for p in run.workload.build_model().parameters() if p.requires_grad)
    assert f"{trained:,}" in printed.splitlines()[-2]
    assert printed.splitlines()[-1].startswith("for one input of ")
    assert list(tmp_path.iterdir()) == []
    assert run_command(["-m", "seed=0,1", "--summary"]) == 2
