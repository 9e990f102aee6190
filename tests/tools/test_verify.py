"""`runner.tools.verify`: the same where it is the same, and different where a mode is wrong."""

from __future__ import annotations

import pytest
import torch
from helpers.compose import FAST

from runner.batching import MicroBatch
from runner.parallel.base import Parallel
from runner.tools import verify


def code_of(*overrides: str) -> int:
    return verify.main([*FAST, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["accumulation=4"],
        ["parallel=ddp", "accumulation=2"],
        ["parallel=fsdp", "max_grad_norm=0.1", "optimizer=adam"],
        ["parallel=ddp", "precision=64"],
        ["parallel=dp", "precision=16"],
    ],
)
def test_equivalent_modes_are_reported_as_the_same(overrides: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert code_of(*overrides) == verify.SAME
    out = capfd.readouterr().out
    assert "the same" in out
    for row in ("loss", "gradients", "weights", "buffers"):
        assert f"\n{row} " in out


def test_a_gradient_with_a_wrong_weight_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    accumulate = Parallel.accumulate

    def forgetting(self: Parallel, model: torch.nn.Module, batch: object, m: MicroBatch, log_due: bool) -> torch.Tensor:
        return accumulate(self, model, batch, m._replace(weight=1), log_due)

    monkeypatch.setattr(Parallel, "accumulate", forgetting)
    assert code_of("accumulation=2") == verify.DIFFERENT
    out = capfd.readouterr().out
    assert "different" in out
    assert [line.split()[0] for line in out.splitlines() if "too large" in line] == ["gradients", "weights"] * 2
    assert "once more in float64" in out


def test_batch_normalisation_of_parts_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["model=resnet18", "data.size=16", "batch_size=8"]
    assert code_of(*small, "accumulation=2", "--steps", "1") == verify.DIFFERENT
    assert "batch normalization computes its statistics on each micro-batch" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel=hogwild"], "parallel.processes: got 2:"),
        (["parallel=ensemble"], "parallel.processes: got 2:"),
        (["parallel=dpd"], "did you mean dp or ddp?"),
        (["optimizer.lr=-1"], "optimizer.lr: got -1"),
        (["--steps", "0"], "--steps: got 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    overrides: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*overrides) == verify.REFUSED
    assert words in capfd.readouterr().err


def test_the_largest_difference_is_relative_and_named() -> None:
    theirs = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 1e-9]), "count": torch.tensor(3)}
    ours = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.0, 2e-9]), "count": torch.tensor(4)}
    found = verify.largest("weights", ours, theirs)
    assert found.where == "a"
    assert found.size == pytest.approx(0.1)
    ours["b"] = torch.tensor([0.0, float("nan")])
    assert verify.largest("weights", ours, theirs).where == "b"


def test_the_reference_differs_in_the_mode_alone() -> None:
    typed = ["seed=3", "parallel=ddp", "parallel.processes=3", "accumulation.steps=2", "optimizer.lr=0.1"]
    assert verify.reference_overrides(typed) == ["seed=3", "optimizer.lr=0.1", "parallel=single", "accumulation=1"]
