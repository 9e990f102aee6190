"""Weights out of a run and into another: by every way in, in every spelling, checked, whole or not at all."""

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
from helpers.command import environment, run_command
from helpers.compose import FAST, Trained, built
from helpers.forged import ABSENT, changed, reseal, write
from helpers.permissions import mode
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runner.config.errors import ConfigError
from runner.storage import checkpoint_selection
from runner.storage.checkpoint import Checkpoint
from runner.storage.checkpoint import load as checkpoint_at
from runner.tools import convert

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run(trained: Callable[..., Trained]) -> Trained:
    """Four steps, each with a checkpoint; the evaluations after steps 2 and 4."""
    run = trained("steps=4", "save_every=1", "eval_every=2", "keep=4", "optimizer.lr=0.2", "schedule=constant")
    assert [path.name for path in checkpoints(run)] == [f"step_0000000{step}" for step in (1, 2, 3, 4)]
    return run


def checkpoints(run: Trained) -> list[Path]:
    return sorted((run.directory / "checkpoints").glob("step_*"))


def saved(run: Trained, step: int) -> Tensors:
    """The tensors of a checkpoint, read without the project."""
    return load_file(run.directory / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def read(path: Path) -> Tensors:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def converted(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said of a conversion that is refused; at most two lines, on standard error."""
    before = capsys.readouterr() and sorted(Path(str(arguments[1])).parent.glob("*"))
    assert converted(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sorted(Path(str(arguments[1])).parent.glob("*")) == before, "nothing is left behind"
    return told.err


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_files_can_be_read_by_whom_the_umask_allows(run: Trained, tmp_path: Path, suffix: str) -> None:
    before = os.umask(0o027)
    try:
        assert converted(run.directory, tmp_path / f"out{suffix}") == 0
    finally:
        os.umask(before)
    assert (tmp_path / f"out{suffix}").stat().st_mode & 0o777 == 0o640


# ---------------------------------------------------------------------------------------------------------------------
# What is read


def test_a_run_directory_means_its_newest_checkpoint(run: Trained, tmp_path: Path) -> None:
    assert converted(run.directory, tmp_path / "out.safetensors") == 0
    assert same(read(tmp_path / "out.safetensors"), saved(run, 4))
    assert not same(saved(run, 4), saved(run, 3)), "or the test would see nothing"


@pytest.mark.parametrize("best", [2, 4])
def test_best_means_the_checkpoint_with_the_best_evaluation(
    run: Trained, tmp_path: Path, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_best(best, monkeypatch)
    assert converted(run.directory, tmp_path / "out.pt", "--best") == 0
    assert same(read(tmp_path / "out.pt"), saved(run, best))


def test_averaged_weights_are_read_as_they_were_evaluated(trained: Callable[..., Trained], tmp_path: Path) -> None:
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


def test_what_the_run_calls_its_best_is_meant(run: Trained, tmp_path: Path) -> None:
    assert converted(run.directory, tmp_path / "out.pt", "--best") == 0
    assert same(read(tmp_path / "out.pt"), saved(run, run.result.best["step"]))


def call_best(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the newest checkpoint call the one after `step` the best."""

    def told(path: Path) -> Checkpoint:
        checkpoint = checkpoint_at(path)
        checkpoint.state["best"] = {"metric": "eval/accuracy", "value": 0.5, "step": step}
        return checkpoint

    monkeypatch.setattr(checkpoint_selection, "load", told)


def test_a_checkpoint_means_itself_also_by_its_file(run: Trained, tmp_path: Path) -> None:
    checkpoint = checkpoints(run)[1]
    assert converted(checkpoint, tmp_path / "directory.pt") == 0
    assert converted(checkpoint / "model.safetensors", tmp_path / "file.pt") == 0
    assert same(read(tmp_path / "directory.pt"), saved(run, 2))
    assert same(read(tmp_path / "file.pt"), saved(run, 2))


def test_a_checkpoint_that_was_set_aside_is_read_when_it_is_named(run: Trained, tmp_path: Path) -> None:
    aside = checkpoints(run)[1].rename(run.directory / "checkpoints" / "step_00000002.superseded")
    assert converted(aside, tmp_path / "out.pt") == 0
    assert len(read(tmp_path / "out.pt")) == 8


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("wrapped", [None, "state_dict", "model"])
def test_a_file_is_read_in_any_spelling(tmp_path: Path, prefix: str, wrapped: str | None) -> None:
    weights = {"a.weight": torch.randn(2, 3), "b.module.bias": torch.arange(3)}
    state = {prefix + name: tensor for name, tensor in weights.items()}
    torch.save({wrapped: state, "epoch": 3} if wrapped else state, tmp_path / "in.pt")
    assert converted(tmp_path / "in.pt", tmp_path / "out.safetensors") == 0
    assert same(read(tmp_path / "out.safetensors"), weights)


def test_there_and_back_again_is_the_same_bytes(run: Trained, tmp_path: Path) -> None:
    for source, destination, *flags in (
        (run.directory, "a.safetensors"),
        (tmp_path / "a.safetensors", "b.pt", "--module-prefix"),
        (tmp_path / "b.pt", "c.pth"),
        (tmp_path / "c.pth", "d.safetensors"),
        (tmp_path / "a.safetensors", "e.safetensors"),
    ):
        assert converted(source, tmp_path / destination, *flags) == 0
    assert (tmp_path / "e.safetensors").read_bytes() == (tmp_path / "d.safetensors").read_bytes()


def test_the_names_of_the_classes_are_in_the_file(run: Trained, tmp_path: Path) -> None:
    assert converted(run.directory, tmp_path / "a.safetensors") == 0
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        signature = json.loads(file.metadata()["model.json"])
    assert signature["classes"] == [str(digit) for digit in range(10)]
    assert signature["inputs"] == [1, 8, 8]


# ---------------------------------------------------------------------------------------------------------------------
# What is written


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_are_plain_or_as_data_parallel_has_them(run: Trained, tmp_path: Path, suffix: str, prefix: str) -> None:
    path = tmp_path / f"out{suffix}"
    assert converted(run.directory, path, *(["--module-prefix"] if prefix else [])) == 0
    assert same(read(path), {prefix + name: tensor for name, tensor in saved(run, 4).items()})


def test_torch_loads_the_prefixed_ones_into_data_parallel_and_the_plain_ones_into_the_model(
    run: Trained, tmp_path: Path
) -> None:
    converted(run.directory, tmp_path / "plain.pt")
    converted(run.directory, tmp_path / "wrapped.pt", "--module-prefix")
    model = run.run.workload.build_model()
    model.load_state_dict(read(tmp_path / "plain.pt"), strict=True)
    torch.nn.DataParallel(model).load_state_dict(read(tmp_path / "wrapped.pt"), strict=True)
    assert same(model.state_dict(), saved(run, 4))


def test_views_transposes_and_tied_tensors_are_written_by_themselves(tmp_path: Path) -> None:
    base = torch.randn(1000, 4)
    weights = {"view": base[:2], "tied": base[:2], "turned": base[:3].T}
    torch.save(weights, tmp_path / "in.pt")
    for name in ("out.safetensors", "out.pt"):
        assert converted(tmp_path / "in.pt", tmp_path / name) == 0
        assert same(read(tmp_path / name), weights)
        assert (tmp_path / name).stat().st_size < 4000 < (tmp_path / "in.pt").stat().st_size


def test_it_says_what_it_wrote_and_what_to_do_with_it(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted(run.directory, tmp_path / "out.pt")
    told = capsys.readouterr()
    parameters = 16 * 10 + 32 * 145 + 64 * 129 + 10 * 65
    assert f"8 tensors, {parameters:,} values, from {checkpoints(run)[-1]}, after step 4\n" in told.out
    assert told.out.endswith(f"start from it: python -m runner model.weights={tmp_path / 'out.pt'} …\n")
    assert told.err == ""


# ---------------------------------------------------------------------------------------------------------------------
# Into a run


@pytest.mark.parametrize(("name", "flags"), [("w.safetensors", []), ("w.pt", []), ("m.pt", ["--module-prefix"])])
def test_a_run_begins_with_exactly_these_weights(run: Trained, tmp_path: Path, name: str, flags: list[str]) -> None:
    converted(run.directory, tmp_path / name, *flags)
    other = built(*FAST, f"model.weights={tmp_path / name}", "seed=7")
    other.workload.prepare()
    assert same(other.workload.build_model().state_dict(), saved(run, 4))


def test_runs_from_either_spelling_end_with_the_same_weights(run: Trained, trained, tmp_path: Path) -> None:
    converted(run.directory, tmp_path / "plain.safetensors")
    converted(run.directory, tmp_path / "wrapped.pt", "--module-prefix")
    options = ("steps=3", "seed=7", "schedule=constant")
    plain = trained(*options, f"model.weights={tmp_path / 'plain.safetensors'}", directory="plain")
    wrapped = trained(*options, f"model.weights={tmp_path / 'wrapped.pt'}", directory="wrapped")
    fresh = trained(*options, directory="fresh")
    assert same(saved(plain, 3), saved(wrapped, 3))
    assert not same(saved(plain, 3), saved(fresh, 3))


def test_the_command_takes_the_file(run: Trained, tmp_path: Path) -> None:
    converted(run.directory, tmp_path / "weights of mine.pt", "--module-prefix")
    code, told = run_command(*FAST, "steps=1", "model.weights=../weights of mine.pt", cwd=tmp_path / "work")
    assert code == 0, told


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(run: Trained, tmp_path: Path) -> None:
    damage(checkpoints(run)[-1] / "model.safetensors")
    program = [sys.executable, "-m", "runner.tools.convert", run.directory, "out.pt"]
    ran = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert same(read(tmp_path / "out.pt"), saved(run, 3))
    why = "is damaged: its SHA-256 is not the manifest's; trying the previous checkpoint"
    assert ran.stderr == f"{checkpoints(run)[-1]}/model.safetensors {why}\n"
    assert checkpoints(run)[-1].name == "step_00000004", "another process may be at work there: nothing is renamed"


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_damaged_checkpoint_that_is_named_is_refused(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damage(checkpoints(run)[1] / "model.safetensors")
    told = refusal(capsys, checkpoints(run)[1] / name, tmp_path / "out.pt")
    assert told.startswith("SOURCE: got '")
    assert "step_00000002/model.safetensors is damaged: its SHA-256 is not the manifest's" in told


def test_a_damaged_best_is_refused_and_a_lost_one_too(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call_best(2, monkeypatch)
    damage(checkpoints(run)[1] / "state.pt")
    assert "step_00000002/state.pt is damaged" in refusal(capsys, run.directory, tmp_path / "out.pt", "--best")
    shutil.rmtree(checkpoints(run)[1])
    assert "step_00000002 does not exist\n  leave out --best" in refusal(
        capsys, run.directory, tmp_path / "out.pt", "--best"
    )


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("flags", [[], ["--best"]])
def test_checkpoints_elsewhere_are_not_taken_for_those_of_the_run(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    folder = run.directory / "checkpoints"
    folder.rename(run.directory.with_name("elsewhere"))
    folder.symlink_to(run.directory.with_name("elsewhere"))
    told = refusal(capsys, run.directory, tmp_path / "out.pt", *flags)
    assert told.startswith("SOURCE: got '")
    assert "it is a symbolic link, which is not followed\n" in told
    for choice in ("last", "best", 4):
        with pytest.raises(ConfigError, match="symbolic link") as refused:
            checkpoint_selection.chosen_checkpoint(run.directory, choice)
        assert refused.value.key == "checkpoint"


@pytest.mark.parametrize("what", ["the run", "the checkpoint", "the file"])
def test_weights_that_the_manifest_does_not_list_are_not_opened(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """There may be a pipe, for whose writer they would be waited for without end."""
    newest = checkpoints(run)[-1]
    file = newest / "model.safetensors"
    file.unlink()
    reseal(newest)
    os.mkfifo(file)
    source = {"the run": run.directory, "the checkpoint": newest, "the file": file}[what]
    told = refusal(capsys, source, tmp_path / "out.safetensors")
    assert told.startswith("SOURCE: ")
    assert "manifest.json does not list model.safetensors" in told


@pytest.mark.parametrize(
    "best", [ABSENT, None, [], {"value": 1.0}, {"step": "../../x"}, {"step": 10**40}, {"step": -1}, {"step": True}]
)
def test_a_best_evaluation_of_another_form_is_refused(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], best: object
) -> None:
    file = checkpoints(run)[-1] / "state.pt"
    write(file, changed(torch.load(file, weights_only=True), ("best",), lambda _: best))
    told = refusal(capsys, run.directory, tmp_path / "out.safetensors", "--best")
    assert told.startswith("SOURCE: ")
    assert "the best evaluation" in told


def test_a_checkpoint_of_another_version_is_refused_as_the_source(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoints(run)[-1]
    reseal(newest, schema=99)
    for source in (run.directory, newest):
        told = refusal(capsys, source, tmp_path / "out.safetensors")
        assert told.startswith("SOURCE: ")
        assert "it has schema 99" in told


def test_a_file_that_runs_code_is_refused_and_runs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Payload:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"weight": Payload()}, tmp_path / "in.pt")
    assert "SOURCE: got" in refusal(capsys, tmp_path / "in.pt", tmp_path / "out.pt")
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        told = refusal(capsys, tmp_path / source, out)
        assert told.startswith("SOURCE: got '")
        assert why in told


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
        with mode(run / secret, 0):
            assert converted(source, destination) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith(f"{key}: got '")
        assert "(Permission denied)" in told.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "in.safetensors", "run"]


def test_best_is_of_a_run_directory_that_has_been_evaluated(
    run: Trained, trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(capsys, checkpoints(run)[0], tmp_path / "out.pt", "--best")
    assert "is not a run directory\n  name the run directory" in told
    early = trained("steps=2", "save_every=1", "eval_every=0", "keep=2", directory="early")
    shutil.rmtree(checkpoints(early)[-1])
    assert "has not been evaluated\n  leave out --best" in refusal(
        capsys, early.directory, tmp_path / "out.pt", "--best"
    )


def test_what_cannot_be_written_is_refused(run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = checkpoints(run)[0] / "copy.pt"
    for destination, why in {
        tmp_path / "out.gguf": "its suffix must be one of .safetensors, .pt, .pth, .pt2, .onnx\n  name a",
        run.directory / "nowhere" / "out.pt": f"there is no such directory\n  mkdir -p {run.directory / 'nowhere'}",
        inside: "it is inside a checkpoint\n  write it elsewhere",
    }.items():
        told = refusal(capsys, run.directory, destination)
        assert told.startswith("DESTINATION: got '")
        assert why in told


def test_a_file_that_is_there_is_replaced_only_when_told(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.pt"
    out.write_text("precious")
    assert "it already exists\n  --force replaces it" in refusal(capsys, run.directory, out)
    assert out.read_text() == "precious"
    assert converted(run.directory, out, "--force") == 0
    assert same(read(out), saved(run, 4))


def test_a_file_may_replace_itself(tmp_path: Path) -> None:
    path, weights = tmp_path / "weights.safetensors", {"a": torch.randn(100, 100)}
    save_file({f"module.{name}": tensor for name, tensor in weights.items()}, path)
    assert converted(path, path, "--force") == 0
    assert same(read(path), weights)


@pytest.mark.parametrize("error", [OSError("No space left on device"), RuntimeError("unexpected pos 64 vs 0\nat …")])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def half(tensors: Tensors, path: Path, _: object) -> None:
        path.write_bytes(b"half of it")
        raise error

    save_file({"a": torch.zeros(3)}, tmp_path / "in.safetensors")
    (tmp_path / "out.pt").write_text("precious")
    monkeypatch.setitem(convert._WRITERS, ".pt", half)
    told = refusal(capsys, tmp_path / "in.safetensors", tmp_path / "out.pt", "--force")
    assert f"it cannot be written: {str(error).splitlines()[0]}\n  make room" in told
    assert (tmp_path / "out.pt").read_text() == "precious"


def test_it_runs_as_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal, as another test converts with a module; what does not depend on that is called in this process."""
    save_file({"a": torch.zeros(3)}, tmp_path / "in.safetensors")
    assert converted(tmp_path / "in.safetensors", tmp_path / "out.pt") == 0
    assert same(read(tmp_path / "out.pt"), {"a": torch.zeros(3)})
    program = [sys.executable, "-m", "runner.tools.convert", "in.safetensors", "out.pt"]
    ran = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == "DESTINATION: got 'out.pt': it already exists\n  --force replaces it\n"
    with pytest.raises(SystemExit) as ended:
        convert.main(["--help"])
    assert ended.value.code == 0
    assert "--module-prefix" in capsys.readouterr().out


def test_a_name_that_is_too_long_with_that_of_the_unfinished_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 245}.pt"
    with pytest.raises(ConfigError) as refused:
        convert.write({"w": torch.ones(2)}, path)
    assert refused.value.key == "DESTINATION"
    assert "File name too long" in refused.value.why
