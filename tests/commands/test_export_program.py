"""Tests of exported programs (.pt2 and ONNX): their outputs equal those of the model for batches of any size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.compose import TINY_CPU
from helpers.extras import require

import runner
from runner.commands import convert, export_program


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runner.SavedRun:
    monkeypatch.chdir(tmp_path)
    result = runner.train([*TINY_CPU, "steps=4", "save_every=2", "keep=2", "eval_every=2", "optimizer.lr=0.2"])
    assert result.directory is not None
    return runner.load(result.directory)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_an_exported_torch_program_has_the_outputs_of_the_model(run: runner.SavedRun) -> None:
    assert convert.main([str(run.directory), "model.pt2"]) == 0
    files = {"model.json": ""}
    program = torch.export.load("model.pt2", extra_files=files).module()
    assert json.loads(files["model.json"])["classes"] == run.classes
    for count in (1, 5):
        inputs = torch.randn(count, 1, 8, 8)
        assert_close(program(inputs), run.model()(inputs))


def test_an_exported_onnx_model_has_the_outputs_of_the_model(run: runner.SavedRun) -> None:
    onnx, _ = require("onnx"), require("onnxscript")
    from onnx.reference import ReferenceEvaluator

    assert convert.main([str(run.checkpoint(2)), "model.onnx"]) == 0
    metadata = {each.key: each.value for each in onnx.load("model.onnx").metadata_props}
    assert json.loads(metadata["model.json"])["classes"] == run.classes
    for count in (1, 5):
        inputs = torch.randn(count, 1, 8, 8)
        [outputs] = ReferenceEvaluator("model.onnx").run(None, {"inputs": inputs.numpy()})
        assert_close(torch.from_numpy(outputs), run.model(2)(inputs).detach())


def test_a_program_whose_outputs_differ_from_the_model_is_not_written(
    run: runner.SavedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(export_program.PROGRAMS, ".pt2", lambda model, inputs, *_: model(inputs) * 1.001 + 0.001)
    assert convert.main([str(run.directory), "model.pt2"]) == 2
    assert "its outputs differ from those of the model by 0.00" in capsys.readouterr().err
    assert not Path("model.pt2").exists()


def test_invalid_exports_are_refused_with_the_key(
    run: runner.SavedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({}, "weights.pt")
    monkeypatch.setattr(export_program, "is_installed", lambda name: False)
    for words, key in {
        ("weights.pt", "model.pt2"): "SOURCE",
        (str(run.checkpoint(2)), "model.pt2", "--checkpoint=best"): "--checkpoint",
        (str(run.directory), "model.pt2", "--module-prefix"): "--module-prefix",
        (str(run.directory), "model.onnx"): "DESTINATION",
        (str(run.directory / "checkpoints" / "step_00000099"), "model.pt2"): "checkpoint",
        (str(run.directory / "checkpoints" / "best"), "model.pt2"): "SOURCE",
    }.items():
        assert convert.main([*words]) == 2
        assert capsys.readouterr().err.startswith(f"{key}: ")


def test_a_damaged_checkpoint_is_not_exported(run: runner.SavedRun, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoint(2) / "model.json").write_text("{}")
    assert convert.main([str(run.checkpoint(2)), "model.pt2"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("checkpoint: ")
    assert "model.json is damaged" in output
