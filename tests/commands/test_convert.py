"""Tests of `runner convert`: weights are exported and imported in every supported format.

Damaged or mismatched files are refused without writing anything.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_edits import REMOVE_KEY, rewrite_manifest, with_value_changed, write_checkpoint_file
from helpers.command import child_environment, run_command
from helpers.compose import TINY_CPU, TrainedRun, build_composed_run
from helpers.permissions import enforced_permissions
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runner.commands import convert
from runner.config.errors import ConfigError
from runner.storage import checkpoint as stored
from runner.storage.checkpoint import Checkpoint
from runner.storage.checkpoint import load as checkpoint_at

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run(trained: Callable[..., TrainedRun]) -> TrainedRun:
    """A run of four steps with a checkpoint after every step, and evaluations after steps 2 and 4."""
    run = trained("steps=4", "save_every=1", "eval_every=2", "keep=4", "optimizer.lr=0.2", "schedule=constant")
    assert [path.name for path in checkpoints(run)] == [f"step_0000000{step}" for step in (1, 2, 3, 4)]
    return run


def checkpoints(run: TrainedRun) -> list[Path]:
    return sorted((run.directory / "checkpoints").glob("step_*"))


def saved(run: TrainedRun, step: int) -> Tensors:
    """Return the weights of a checkpoint, read with safetensors instead of `runner`."""
    return load_file(run.directory / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def read(path: Path) -> Tensors:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def converted(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Check that a conversion is refused and writes no file, and return what it prints to standard error."""
    before = capsys.readouterr() and sorted(Path(str(arguments[1])).parent.glob("*"))
    assert converted(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sorted(Path(str(arguments[1])).parent.glob("*")) == before, "nothing is left behind"
    return captured.err


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_output_file_permissions_follow_the_umask(run: TrainedRun, tmp_path: Path, suffix: str) -> None:
    before = os.umask(0o027)
    try:
        assert converted(run.directory, tmp_path / f"out{suffix}", "--checkpoint=last") == 0
    finally:
        os.umask(before)
    assert (tmp_path / f"out{suffix}").stat().st_mode & 0o777 == 0o640


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def test_the_newest_checkpoint_or_that_of_a_step_can_be_chosen(run: TrainedRun, tmp_path: Path) -> None:
    for choice, step in {"last": 4, "3": 3}.items():
        assert converted(run.directory, tmp_path / f"{choice}.safetensors", "--checkpoint", choice) == 0
        assert same(read(tmp_path / f"{choice}.safetensors"), saved(run, step))
    assert not same(saved(run, 4), saved(run, 3)), "or the test would see nothing"


@pytest.mark.parametrize("best", [2, 4])
def test_best_means_the_checkpoint_with_the_best_evaluation(
    run: TrainedRun, tmp_path: Path, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_best(best, monkeypatch)
    assert converted(run.directory, tmp_path / "out.pt") == 0
    assert same(read(tmp_path / "out.pt"), saved(run, best))


def test_averaged_weights_are_exported_unless_another_file_is_named(
    trained: Callable[..., TrainedRun], tmp_path: Path
) -> None:
    run = trained("steps=4", "ema.decay=0.9")
    newest, out = checkpoints(run)[-1], tmp_path / "out.safetensors"
    plain, averaged = load_file(newest / "model.safetensors"), load_file(newest / "ema.safetensors")
    assert not same(plain, averaged), "or the test would see nothing"
    for source, wanted in {
        run.directory: averaged,
        newest: averaged,
        newest / "model.safetensors": plain,
        newest / "ema.safetensors": averaged,
    }.items():
        assert converted(source, out, "--force") == 0
        assert same(read(out), wanted)


def test_best_means_the_best_step_in_the_result_of_the_run(run: TrainedRun, tmp_path: Path) -> None:
    assert converted(run.directory, tmp_path / "out.pt") == 0
    assert same(read(tmp_path / "out.pt"), saved(run, run.result.best["step"]))


def call_best(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the state of every checkpoint that is loaded, so that the best evaluation was at step `step`."""

    def told(path: Path) -> Checkpoint:
        checkpoint = checkpoint_at(path)
        checkpoint.state["best"] = {"metric": "eval/accuracy", "value": 0.5, "step": step}
        return checkpoint

    monkeypatch.setattr(stored, "load", told)


def test_a_checkpoint_directory_or_its_weights_file_can_be_the_source(run: TrainedRun, tmp_path: Path) -> None:
    checkpoint = checkpoints(run)[1]
    assert converted(checkpoint, tmp_path / "directory.pt") == 0
    assert converted(checkpoint / "model.safetensors", tmp_path / "file.pt") == 0
    assert same(read(tmp_path / "directory.pt"), saved(run, 2))
    assert same(read(tmp_path / "file.pt"), saved(run, 2))


def test_a_superseded_checkpoint_can_be_converted_by_its_path(run: TrainedRun, tmp_path: Path) -> None:
    aside = checkpoints(run)[1].rename(run.directory / "checkpoints" / "step_00000002.superseded")
    assert converted(aside, tmp_path / "out.pt") == 0
    assert len(read(tmp_path / "out.pt")) == 8


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("wrapped", [None, "state_dict", "model"])
def test_wrapper_prefixes_and_enclosing_dicts_are_removed(tmp_path: Path, prefix: str, wrapped: str | None) -> None:
    weights = {"a.weight": torch.randn(2, 3), "b.module.bias": torch.arange(3)}
    state = {prefix + name: tensor for name, tensor in weights.items()}
    torch.save({wrapped: state, "epoch": 3} if wrapped else state, tmp_path / "in.pt")
    assert converted(tmp_path / "in.pt", tmp_path / "out.safetensors") == 0
    assert same(read(tmp_path / "out.safetensors"), weights)


def test_conversion_to_another_format_and_back_is_byte_identical(run: TrainedRun, tmp_path: Path) -> None:
    for source, destination, *flags in (
        (run.directory, "a.safetensors"),
        (tmp_path / "a.safetensors", "b.pt", "--module-prefix"),
        (tmp_path / "b.pt", "c.pth"),
        (tmp_path / "c.pth", "d.safetensors"),
        (tmp_path / "a.safetensors", "e.safetensors"),
    ):
        assert converted(source, tmp_path / destination, *flags) == 0
    assert (tmp_path / "e.safetensors").read_bytes() == (tmp_path / "d.safetensors").read_bytes()


def test_class_names_are_in_the_metadata_of_the_file(run: TrainedRun, tmp_path: Path) -> None:
    assert converted(run.directory, tmp_path / "a.safetensors", "--checkpoint=last") == 0
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        signature = json.loads(file.metadata()["model.json"])
    assert signature["classes"] == [str(digit) for digit in range(10)]
    assert signature["inputs"] == [1, 8, 8]


# ---------------------------------------------------------------------------------------------------------------------
# Output files


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_module_prefix_is_added_only_with_its_flag(run: TrainedRun, tmp_path: Path, suffix: str, prefix: str) -> None:
    path = tmp_path / f"out{suffix}"
    assert converted(run.directory, path, "--checkpoint=last", *(["--module-prefix"] if prefix else [])) == 0
    assert same(read(path), {prefix + name: tensor for name, tensor in saved(run, 4).items()})


def test_exported_weights_load_into_the_model_and_into_data_parallel(run: TrainedRun, tmp_path: Path) -> None:
    converted(run.directory, tmp_path / "plain.pt", "--checkpoint=last")
    converted(run.directory, tmp_path / "wrapped.pt", "--checkpoint=last", "--module-prefix")
    model = run.run.workload.build_model()
    model.load_state_dict(read(tmp_path / "plain.pt"), strict=True)
    torch.nn.DataParallel(model).load_state_dict(read(tmp_path / "wrapped.pt"), strict=True)
    assert same(model.state_dict(), saved(run, 4))


def test_views_and_tied_tensors_are_written_without_their_shared_storage(tmp_path: Path) -> None:
    base = torch.randn(1000, 4)
    weights = {"view": base[:2], "tied": base[:2], "turned": base[:3].T}
    torch.save(weights, tmp_path / "in.pt")
    for name in ("out.safetensors", "out.pt"):
        assert converted(tmp_path / "in.pt", tmp_path / name) == 0
        assert same(read(tmp_path / name), weights)
        assert (tmp_path / name).stat().st_size < 4000 < (tmp_path / "in.pt").stat().st_size


def test_the_output_describes_the_file_and_how_to_use_it(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted(run.directory, tmp_path / "out.pt", "--checkpoint=last")
    captured = capsys.readouterr()
    parameters = 16 * 10 + 32 * 145 + 64 * 129 + 10 * 65
    assert f"8 tensors, {parameters:,} values, from {checkpoints(run)[-1]}, after step 4\n" in captured.out
    assert captured.out.endswith(f"start from it: model.weights={tmp_path / 'out.pt'}\n")
    assert captured.err == ""


# ---------------------------------------------------------------------------------------------------------------------
# Loading converted weights into a run


@pytest.mark.parametrize(("name", "flags"), [("w.safetensors", []), ("w.pt", []), ("m.pt", ["--module-prefix"])])
def test_a_run_starts_from_exactly_the_converted_weights(
    run: TrainedRun, tmp_path: Path, name: str, flags: list[str]
) -> None:
    converted(run.directory, tmp_path / name, "--checkpoint=last", *flags)
    other = build_composed_run(*TINY_CPU, f"model.weights={tmp_path / name}", "seed=7")
    other.workload.prepare()
    assert same(other.workload.build_model().state_dict(), saved(run, 4))


def test_training_from_plain_or_prefixed_weights_is_bitwise_equal(run: TrainedRun, trained, tmp_path: Path) -> None:
    converted(run.directory, tmp_path / "plain.safetensors", "--checkpoint=last")
    converted(run.directory, tmp_path / "wrapped.pt", "--checkpoint=last", "--module-prefix")
    options = ("steps=3", "seed=7", "schedule=constant")
    plain = trained(*options, f"model.weights={tmp_path / 'plain.safetensors'}", directory="plain")
    wrapped = trained(*options, f"model.weights={tmp_path / 'wrapped.pt'}", directory="wrapped")
    fresh = trained(*options, directory="fresh")
    assert same(saved(plain, 3), saved(wrapped, 3))
    assert not same(saved(plain, 3), saved(fresh, 3))


def test_the_command_trains_from_a_converted_file(run: TrainedRun, tmp_path: Path) -> None:
    converted(run.directory, tmp_path / "weights of mine.pt", "--checkpoint=last", "--module-prefix")
    code, output = run_command(*TINY_CPU, "steps=1", "model.weights=../weights of mine.pt", cwd=tmp_path / "work")
    assert code == 0, output


# ---------------------------------------------------------------------------------------------------------------------
# Refused conversions


def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_used(run: TrainedRun, tmp_path: Path) -> None:
    damage(checkpoints(run)[-1] / "model.safetensors")
    program = [sys.executable, "-m", "runner", "convert", run.directory, "out.pt", "--checkpoint=last"]
    ran = subprocess.run(program, cwd=tmp_path, env=child_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert same(read(tmp_path / "out.pt"), saved(run, 3))
    why = "is damaged: its SHA-256 is not the manifest's; trying the previous checkpoint"
    assert ran.stderr == f"{checkpoints(run)[-1]}/model.safetensors {why}\n"
    assert checkpoints(run)[-1].name == "step_00000004", "another process may be at work there: nothing is renamed"


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_damaged_checkpoint_given_as_the_source_is_refused(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damage(checkpoints(run)[1] / "model.safetensors")
    output = refusal(capsys, checkpoints(run)[1] / name, tmp_path / "out.pt")
    assert output.startswith("SOURCE: got '")
    assert "step_00000002/model.safetensors is damaged: its SHA-256 is not the manifest's" in output


def test_a_damaged_or_missing_best_checkpoint_is_refused(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call_best(2, monkeypatch)
    damage(checkpoints(run)[1] / "state.pt")
    assert "step_00000002/state.pt is damaged" in refusal(capsys, run.directory, tmp_path / "out.pt")
    shutil.rmtree(checkpoints(run)[1])
    assert "step_00000002 does not exist\n  take last" in refusal(capsys, run.directory, tmp_path / "out.pt")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("flags", [[], ["--checkpoint=last"]])
def test_a_symbolic_link_instead_of_the_checkpoints_directory_is_refused(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    folder = run.directory / "checkpoints"
    folder.rename(run.directory.with_name("elsewhere"))
    folder.symlink_to(run.directory.with_name("elsewhere"))
    output = refusal(capsys, run.directory, tmp_path / "out.pt", *flags)
    assert output.startswith("SOURCE: got '")
    assert "it is a symbolic link, which is not followed\n" in output
    for choice in ("last", "best", 4):
        with pytest.raises(ConfigError, match="symbolic link") as refused:
            stored.chosen_checkpoint(run.directory, choice)
        assert refused.value.key == "checkpoint"


@pytest.mark.parametrize("what", ["the run", "the checkpoint", "the file"])
def test_weights_that_the_manifest_does_not_list_are_not_opened(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """In this test, `model.safetensors` is a named pipe without a writer. Opening the pipe would block forever."""
    newest = checkpoints(run)[-1]
    file = newest / "model.safetensors"
    file.unlink()
    rewrite_manifest(newest)
    os.mkfifo(file)
    source = {"the run": run.directory, "the checkpoint": newest, "the file": file}[what]
    output = refusal(capsys, source, tmp_path / "out.safetensors")
    assert output.startswith("SOURCE: ")
    assert "manifest.json does not list model.safetensors" in output


@pytest.mark.parametrize(
    "best", [REMOVE_KEY, None, [], {"value": 1.0}, {"step": "../../x"}, {"step": 10**40}, {"step": -1}, {"step": True}]
)
def test_an_invalid_best_evaluation_in_a_checkpoint_is_refused(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], best: object
) -> None:
    file = checkpoints(run)[-1] / "state.pt"
    write_checkpoint_file(file, with_value_changed(torch.load(file, weights_only=True), ("best",), lambda _: best))
    output = refusal(capsys, run.directory, tmp_path / "out.safetensors")
    assert output.startswith("SOURCE: ")
    assert "the best evaluation" in output


def test_a_checkpoint_with_another_schema_version_is_refused(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoints(run)[-1]
    rewrite_manifest(newest, schema=99)
    for source in (run.directory, newest):
        output = refusal(capsys, source, tmp_path / "out.safetensors")
        assert output.startswith("SOURCE: ")
        assert "it has schema 99" in output


def test_a_pickle_that_would_run_code_is_refused_without_running_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Payload:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"weight": Payload()}, tmp_path / "in.pt")
    assert "SOURCE: got" in refusal(capsys, tmp_path / "in.pt", tmp_path / "out.pt")
    assert not (tmp_path / "ran").exists()


def test_missing_empty_and_invalid_sources_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    torch.save({"lr": 0.1}, tmp_path / "no_weights.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"no weights at all")
    out = tmp_path / "out.pt"
    for source, why in {
        "absent": "there is no such file or directory\n  name a run directory, a checkpoint in one, or a file",
        "empty": "it has no checkpoint yet\n  let the run save one",
        "folder": "it contains no checkpoint\n  name a run directory",
        "no_weights.pt": "state_dict\n  ",
        "broken.safetensors": "SafetensorError: ",
    }.items():
        output = refusal(capsys, tmp_path / source, out)
        assert output.startswith("SOURCE: got '")
        assert why in output


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_paths_without_permission_are_refused_by_key(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    save_file({"a": torch.zeros(3)}, tmp_path / "in.safetensors")
    run, out = tmp_path / "run", tmp_path / f"out{suffix}"
    refused = [("", run, out, "SOURCE"), ("", run / "x", out, "SOURCE"), ("checkpoints", run, out, "SOURCE")]
    inside = [("", tmp_path / "in.safetensors", run / f"{name}{suffix}", "DESTINATION") for name in ("a", "b/a")]
    for secret, source, destination, key in refused + inside:
        with enforced_permissions(run / secret, 0):
            assert converted(source, destination) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"{key}: got '")
        assert "(Permission denied)" in captured.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "in.safetensors", "run"]


def test_the_best_checkpoint_is_that_of_a_run_with_an_evaluation(
    run: TrainedRun, trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = refusal(capsys, checkpoints(run)[0], tmp_path / "out.pt", "--checkpoint=best")
    assert "is not a run directory\n  leave it out" in output
    early = trained("steps=2", "save_every=1", "eval_every=0", "keep=2", directory="early")
    shutil.rmtree(checkpoints(early)[-1])
    assert "has not been evaluated\n  take last" in refusal(capsys, early.directory, tmp_path / "out.pt")


def test_invalid_destinations_are_refused(run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = checkpoints(run)[0] / "copy.pt"
    for destination, why in {
        tmp_path / "out.gguf": "its suffix must be one of .safetensors, .pt, .pth, .pt2, .onnx\n  name a",
        run.directory / "nowhere" / "out.pt": f"there is no such directory\n  mkdir -p {run.directory / 'nowhere'}",
        inside: "it is inside a checkpoint\n  write it elsewhere",
    }.items():
        output = refusal(capsys, run.directory, destination)
        assert output.startswith("DESTINATION: got '")
        assert why in output


def test_an_existing_file_is_replaced_only_with_force(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.pt"
    out.write_text("precious")
    assert "it already exists\n  --force replaces it" in refusal(capsys, run.directory, out)
    assert out.read_text() == "precious"
    assert converted(run.directory, out, "--force", "--checkpoint=last") == 0
    assert same(read(out), saved(run, 4))


def test_a_file_can_be_converted_in_place(tmp_path: Path) -> None:
    path, weights = tmp_path / "weights.safetensors", {"a": torch.randn(100, 100)}
    save_file({f"module.{name}": tensor for name, tensor in weights.items()}, path)
    assert converted(path, path, "--force") == 0
    assert same(read(path), weights)


@pytest.mark.parametrize("error", [OSError("No space left on device"), RuntimeError("unexpected pos 64 vs 0\nat …")])
def test_a_full_disk_leaves_the_existing_file_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def half(tensors: Tensors, path: Path, _: object) -> None:
        path.write_bytes(b"half of it")
        raise error

    save_file({"a": torch.zeros(3)}, tmp_path / "in.safetensors")
    (tmp_path / "out.pt").write_text("precious")
    monkeypatch.setitem(convert._WRITERS, ".pt", half)
    output = refusal(capsys, tmp_path / "in.safetensors", tmp_path / "out.pt", "--force")
    assert f"it cannot be written: {str(error).splitlines()[0]}\n  make room" in output
    assert (tmp_path / "out.pt").read_text() == "precious"


def test_it_runs_as_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The module runs in a subprocess for a conversion that is refused.

    Another test runs the module in a subprocess for a conversion that succeeds.
    """
    save_file({"a": torch.zeros(3)}, tmp_path / "in.safetensors")
    assert converted(tmp_path / "in.safetensors", tmp_path / "out.pt") == 0
    assert same(read(tmp_path / "out.pt"), {"a": torch.zeros(3)})
    program = [sys.executable, "-m", "runner", "convert", "in.safetensors", "out.pt"]
    ran = subprocess.run(program, cwd=tmp_path, env=child_environment(), capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == "DESTINATION: got 'out.pt': it already exists\n  --force replaces it\n"
    with pytest.raises(SystemExit) as ended:
        convert.main(["--help"])
    assert ended.value.code == 0
    assert "--module-prefix" in capsys.readouterr().out


def test_a_file_name_that_is_too_long_for_the_temporary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 245}.pt"
    with pytest.raises(ConfigError) as refused:
        convert.write({"w": torch.ones(2)}, path)
    assert refused.value.key == "DESTINATION"
    assert "File name too long" in refused.value.why
