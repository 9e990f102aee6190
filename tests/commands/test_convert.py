"""Tests of `runner convert`: weights in every format, models as programs, and what is refused, without writing it."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import networks_to_export as programs
from helpers.checkpoint_edits import rewrite_manifest, with_value_changed, write_checkpoint_file
from helpers.compose import TINY_CPU
from helpers.disk_faults import DiskFault, inject_disk_fault
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import runner
from runner.commands import convert
from runner.config.overrides import text_override
from runner.run import build_run

Tensors = dict[str, torch.Tensor]

RUN = ("steps=4", "save_every=1", "eval_every=2", "keep=4", "optimizer.lr=0.2", "schedule=constant")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A run of four steps with a checkpoint after every step, and evaluations after steps 2 and 4."""
    return runner.train([*TINY_CPU, *RUN, f"output_root={tmp_path_factory.mktemp('convert')}"]).directory


@pytest.fixture
def run(original: Path, tmp_path, monkeypatch) -> Path:
    """A copy of the run."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(original, tmp_path / "runs" / "run"))


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def saved(run: Path, step: int) -> Tensors:
    """Return the weights of a checkpoint, read with safetensors instead of `runner`."""
    return load_file(checkpoint(run, step) / "model.safetensors")


def read(path: str | Path) -> Tensors:
    return load_file(path) if Path(path).suffix == ".safetensors" else torch.load(path, weights_only=True)


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def converted(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def refusal(capsys: pytest.CaptureFixture[str], source: object, destination: object, *flags: str) -> str:
    """Check that a conversion is refused and writes no file, and return what it prints to standard error."""
    before = capsys.readouterr() and sorted(Path(str(destination)).parent.glob("*"))
    assert converted(source, destination, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sorted(Path(str(destination)).parent.glob("*")) == before, "nothing is left behind"
    return captured.err


def test_a_checkpoint_can_be_chosen_and_the_best_is_the_default(run):
    best = json.loads((run / "result.json").read_text())["best"]["step"]
    for flags, step in {("--checkpoint=last",): 4, ("--checkpoint=3",): 3, (): best}.items():
        assert converted(run, "out.safetensors", *flags, "--force") == 0
        assert same(read("out.safetensors"), saved(run, step))
    assert not same(saved(run, 4), saved(run, 3)), "or the test would see nothing"


def test_each_format_has_the_weights_and_a_conversion_back_or_in_place_is_byte_identical(run):
    weights = saved(run, 4)
    prefixed = {f"module.{name}": tensor for name, tensor in weights.items()}
    for source, destination, flags, wanted in (
        (run, "a.safetensors", ["--checkpoint=last"], weights),
        ("a.safetensors", "b.pt", ["--module-prefix"], prefixed),
        ("b.pt", "c.pth", [], weights),
        ("c.pth", "d.safetensors", [], weights),
        ("a.safetensors", "e.safetensors", ["--module-prefix"], prefixed),
        ("e.safetensors", "e.safetensors", ["--force"], weights),
    ):
        assert converted(source, destination, *flags) == 0
        assert same(read(destination), wanted)
    assert Path("d.safetensors").read_bytes() == Path("e.safetensors").read_bytes()
    with safe_open("a.safetensors", "pt") as file:
        signature = json.loads(file.metadata()["model.json"])
    assert (signature["classes"], signature["inputs"]) == ([str(digit) for digit in range(10)], [1, 8, 8])


def test_views_and_tied_tensors_are_written_without_their_shared_storage(tmp_path):
    base = torch.randn(1000, 4)
    weights = {"view": base[:2], "tied": base[:2], "turned": base[:3].T}
    torch.save(weights, tmp_path / "in.pt")
    for name in ("out.safetensors", "out.pt"):
        assert converted(tmp_path / "in.pt", tmp_path / name) == 0
        assert same(read(tmp_path / name), weights)
        assert (tmp_path / name).stat().st_size < 4000 < (tmp_path / "in.pt").stat().st_size


def test_a_run_starts_from_exactly_the_converted_weights(run, capsys):
    for name, flags in {"plain.safetensors": [], "of mine.pt": ["--module-prefix"]}.items():
        assert converted(run, name, "--checkpoint=last", *flags) == 0
        said = capsys.readouterr().out
        parameters = 16 * 10 + 32 * 145 + 64 * 129 + 10 * 65
        assert f"8 tensors, {parameters:,} values, from {checkpoint(run, 4)}, after step 4\n" in said
        assert said.endswith(f"start from it: {text_override('model.weights', Path(name))}\n")
        other = build_run(dict(runner.compose([*TINY_CPU, f"model.weights='{name}'", "seed=7"])))
        other.workload.prepare()
        model = other.workload.build_model()
        assert same(model.state_dict(), saved(run, 4))
    torch.nn.DataParallel(model).load_state_dict(read("of mine.pt"), strict=True)


def test_an_exported_torch_program_has_the_outputs_of_the_model(run):
    assert converted(run, "model.pt2") == 0
    files, original = {"model.json": ""}, runner.load(run)
    program = torch.export.load("model.pt2", extra_files=files).module()
    assert json.loads(files["model.json"])["classes"] == original.classes
    for count in (1, 5):
        inputs = torch.randn(count, 1, 8, 8)
        torch.testing.assert_close(program(inputs), original.model()(inputs), rtol=0, atol=1e-5)


NETWORKS = Path(programs.__file__)


@pytest.mark.parametrize("name", ["Lengths", "ComplexWeights", "Parametrized"])
def test_a_program_of_a_network_of_ones_own_takes_batches_of_any_size(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (f"model={NETWORKS}:{name}", "steps=1", f"output_root={tmp_path}/runs", "optimizer=sgd")
    run = runner.train([*TINY_CPU, *words]).directory
    assert converted(run, "model.pt2", words[0]) == 0
    program, model = torch.export.load("model.pt2").module(), runner.load(run, model=getattr(programs, name)).model()
    for count in (1, 5):
        inputs = torch.randn(count, 1, 8, 8)
        torch.testing.assert_close(program(inputs), model(inputs), rtol=0, atol=1e-5)


def test_a_network_for_batches_of_one_size_is_refused_with_what_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word = f"model={NETWORKS}:Loops"
    run = runner.train([*TINY_CPU, word, "steps=1", f"output_root={tmp_path}/runs"]).directory
    assert "your code specialized it to be a constant" in " ".join(refusal(capsys, run, "model.pt2", word).split())


def test_a_program_whose_outputs_differ_from_the_model_is_not_written(run, monkeypatch, capsys):
    monkeypatch.setitem(convert.PROGRAMS, ".pt2", lambda model, *_: lambda inputs: model(inputs) * 1.001 + 0.001)
    assert "its outputs differ from those of the model by 0.00" in refusal(capsys, run, "model.pt2")


def test_damaged_checkpoints_and_those_of_another_schema_are_refused(run, capsys):
    weights = checkpoint(run, 2) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    rewrite_manifest(checkpoint(run, 4), schema=99)
    for choice, why in (("2", "model.safetensors is damaged"), ("last", "it has schema 99"), ("4", "it has schema 99")):
        for out in ("out.pt", "out.pt2"):
            assert why in refusal(capsys, run, out, f"--checkpoint={choice}")


def test_weights_that_the_manifest_does_not_list_are_not_opened(run, capsys):
    """Here, they are a named pipe without a writer, whose opening would block forever."""
    file = checkpoint(run, 4) / "model.safetensors"
    file.unlink()
    rewrite_manifest(checkpoint(run, 4))
    os.mkfifo(file)
    assert "manifest.json does not list model.safetensors" in refusal(capsys, run, "out.pt", "--checkpoint=4")
    assert "it is not a regular file" in refusal(capsys, file, "out.pt")


def test_a_best_checkpoint_that_is_missing_unknown_or_forged_is_refused(run, capsys):
    file = checkpoint(run, 4) / "state.pt"
    shutil.rmtree(checkpoint(run, 2))
    for best, why in (
        ({"step": 2}, "step_00000002 does not exist\n  take last"),
        ({}, "has no best evaluation\n  take last"),
        (None, "the best evaluation"),
        ({"step": "../../x"}, "the best evaluation"),
        ({"step": 10**40}, "the best evaluation"),
    ):
        state = torch.load(file, weights_only=True)
        write_checkpoint_file(file, with_value_changed(state, ("best",), lambda _, best=best: best))
        assert why in refusal(capsys, run, "out.pt")


def test_invalid_sources_destinations_and_flags_are_refused_by_key(run, capsys, monkeypatch):
    monkeypatch.setattr(convert, "is_installed", lambda name: False)
    torch.save({"lr": 0.1}, "no_weights.pt")
    torch.save({"weight": torch.ones(2)}, "weights.pt")
    Path("broken.safetensors").write_bytes(b"no weights at all")
    (checkpoint(run, 1) / "manifest.json").touch()
    for words, start, why in (
        (("absent", "out.pt"), "SOURCE: got '", "there is no such file or directory"),
        (("no_weights.pt", "out.pt"), "SOURCE: got '", "state_dict\n"),
        (("broken.safetensors", "out.pt"), "SOURCE: got '", "SafetensorError: "),
        (("weights.pt", "out.pt", "--checkpoint=best"), "--checkpoint: got 'best'", "is not a run directory"),
        ((checkpoint(run, 2), "out.pt"), "RUN: got '", "--checkpoint 2"),
        ((run, "out.pt", "--checkpoint=9"), "--checkpoint: got '9'", "there is no such checkpoint"),
        ((run, "out.gguf"), "DESTINATION: got '", "its suffix must be one of .safetensors, .pt, .pth, .pt2, .onnx\n"),
        ((run, checkpoint(run, 1) / "copy.pt"), "DESTINATION: got '", "it is inside a checkpoint"),
        ((run, f"{'x' * 252}.pt"), "DESTINATION: got '", "File name too long"),
        ((run, "weights.pt"), "DESTINATION: got '", "it already exists\n  --force replaces it"),
        ((run, "out.pt2", "--module-prefix"), "--module-prefix: got True", "a program has no names"),
        ((run, "out.onnx"), "DESTINATION: got '", "onnx and onnxscript are not both installed"),
    ):
        output = refusal(capsys, *words)
        assert output.startswith(start), output
        assert why in output, output


def test_a_full_disk_leaves_the_existing_file_unchanged(tmp_path, capsys):
    source, out, name = tmp_path / "in.safetensors", tmp_path / "weights.pt", "weights.pt"
    save_file({"a": torch.zeros(3)}, source)
    out.write_text("precious")
    with inject_disk_fault(DiskFault("fsync", name, errno.ENOSPC)) as failed:
        assert "it cannot be written: [Errno 28] No space left" in refusal(capsys, source, out, "--force")
    assert (failed(), out.read_text()) == (True, "precious")
