"""Tests of `runner.train`: it trains as the command does, and does not change the settings of its process."""

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import child_environment, run_command
from helpers.compose import TINY_CPU
from helpers.runs import assert_checkpoint_bitwise_equal, checkpoint_tensors, only_run, write_images

import runner
from runner import training
from runner.commands.plan import plan as plan_of
from runner.system.tables import size

pytestmark = pytest.mark.usefixtures("elsewhere")
WORDS = [*TINY_CPU, "steps=6", "eval_every=3"]


def test_training_from_python_ends_with_the_weights_of_the_command(tmp_path):
    (tmp_path / "here").mkdir()
    code, output = run_command(*WORDS, cwd=tmp_path / "there")
    assert code == 0, output
    for more in ([], ["accumulation=auto"]):
        result = runner.train(["output_root=here", *WORDS, *more])
        assert runner.load(result.directory).config["accumulation"]["steps"] == 1
        assert_checkpoint_bitwise_equal(result.directory, checkpoint_tensors(only_run(tmp_path / "there")))


def test_a_config_can_be_trained_twice_and_a_result_equals_result_json():
    config = runner.compose(WORDS)
    before = str(config)
    one, other = runner.train(config), runner.train(config)
    assert one.directory != other.directory
    assert one.metrics == other.metrics
    assert str(config) == before
    assert (one.status, one.exit_code, one.steps) == ("done", 0, 6)
    assert one.evaluation.keys() == {"eval/loss", "eval/accuracy"}
    assert json.loads((one.directory / "result.json").read_text()) == one.as_dict()
    assert one.directory.parent.parent == Path.cwd() / "outputs"
    assert "no effect" not in (one.directory / "log.txt").read_text(), "whose default is not typed"
    continued = runner.train([f"resume={one.directory}", "steps=8"])
    assert (continued.steps, continued.directory) == (8, one.directory)


@pytest.mark.parametrize("words", [["deterministic=true", "precision=tf32"], ["precision=bf16", "optimizer.lr=0.2"]])
def test_settings_of_the_caller_neither_change_the_run_nor_are_changed_by_it(words):
    usual = runner.train([*WORDS, *words])
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            result = runner.train([*WORDS, *words])
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_autocast_cache_enabled()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == (torch.float64, "medium")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        signal.signal(signal.SIGTERM, handler)
    assert result.metrics == usual.metrics


@pytest.mark.parametrize(("word", "key"), [("optimizer.lr=-1", "optimizer.lr"), ("batch_size=5000", "batch_size")])
def test_a_config_that_cannot_run_is_an_error_and_leaves_nothing_behind(word, key):
    with pytest.raises(runner.ConfigError) as error:
        runner.train([*WORDS, word])
    assert error.value.key == key
    assert not Path("outputs").exists()


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError("on purpose")


def test_a_crash_is_raised_with_its_cause_and_a_resume_that_crashes_at_its_start_keeps_the_saved_steps(
    monkeypatch, capfd
):
    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluate", fail)
        with pytest.raises(runner.CrashedError, match="ZeroDivisionError: on purpose") as crash:
            runner.train([*WORDS, "save_every=2"])
    assert isinstance(crash.value.__cause__, ZeroDivisionError)
    result = crash.value.result
    assert (result.status, result.exit_code, result.steps) == ("crashed", 1, 3)
    assert json.loads((result.directory / "result.json").read_text())["status"] == "crashed"
    lines = capfd.readouterr().err.splitlines()
    code = lines.index('    raise ZeroDivisionError("on purpose")')
    place = re.fullmatch(rf'  File "{re.escape(__file__)}", line (\d+), in fail', lines[code - 1])
    assert place
    assert lines[-1] == f"ZeroDivisionError: on purpose ({__file__}:{place[1]})"

    monkeypatch.setattr(training, "prepare", fail)
    with pytest.raises(runner.CrashedError, match="ZeroDivisionError: on purpose") as crash:
        runner.train([f"resume={result.directory}", "steps=12"])
    assert (crash.value.result.status, crash.value.result.steps) == ("crashed", 2)


def test_a_run_that_diverged_has_a_result():
    result = runner.train([*WORDS, "schedule=constant", "optimizer.lr=900", "batch_size=32", "steps=40"])
    assert (result.status, result.exit_code) == ("diverged", 3)
    assert "not finite at step" in result.error


def test_a_stop_signal_ends_the_training_and_not_the_program(monkeypatch):
    step = training.train_step

    def interrupted(state: training.State, *rest: object) -> torch.Tensor | None:
        if state.step == 2:
            signal.raise_signal(signal.SIGINT)
        return step(state, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "train_step", interrupted)
    result = runner.train(WORDS)
    assert (result.status, result.exit_code, result.steps) == ("stopped", 75, 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_out_of_memory_is_told_what_it_needs_and_what_would_need_less(monkeypatch, tmp_path):
    words = ["model=convnet", "data=synthetic", "data.size=16", "batch_size=256", "device=cpu", "steps=3"]
    words += ["eval_every=0", f"output_root={tmp_path}"]
    step = training.train_step

    def failing(state: training.State, *rest: Any, **options: Any) -> torch.Tensor | None:
        if state.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(state, *rest, **options)

    monkeypatch.setattr(training, "train_step", failing)
    with pytest.raises(runner.CrashedError):
        runner.train(words)
    [log] = tmp_path.glob("*/*/log.txt")
    [needed] = re.findall(r"tensors need (\S+ MB) according", log.read_text())
    assert needed == size(plan_of(words)["ranks"][0]["peak_bytes"])
    changes = re.findall(r" needs (\S+ MB) per process: (.+) \(", log.read_text())
    assert len(changes) == 3
    needed, overrides = changes[0]
    assert needed == size(plan_of([*words, *overrides.split()])["ranks"][0]["peak_bytes"])


def test_epochs_beside_steps_are_said_to_have_no_effect():
    for word, said in (("epochs=2", True), ("epochs=null", False)):
        result = runner.train([*WORDS, "steps=1", word])
        assert ("epochs has no effect" in (result.directory / "log.txt").read_text()) is said


def test_a_thread_can_train():
    results: list[runner.Result] = []
    thread = threading.Thread(target=lambda: results.append(runner.train(WORDS)))
    thread.start()
    thread.join()
    assert results[0].status == "done"


def test_imports_and_runs_in_a_notebook_leave_the_process_as_it_was(tmp_path):
    write_images(tmp_path / "photos")
    code = "import helpers.process_settings; helpers.process_settings.main()"
    words = [sys.executable, "-c", code, str(tmp_path / "photos")]
    ran = subprocess.run(words, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    *results, exitcode, changed = map(json.loads, ran.stdout.splitlines()[-5:])
    assert results == [["diverged", 1], ["done", 1], ["done", 2]]
    assert exitcode == -signal.SIGTERM
    assert len(changed) == 6
    if torch.__version__ < "2.14":  # torch 2.11 needs its compiler to train, and imports it
        changed["first run"].remove("compiler")
    assert {step: names for step, names in changed.items() if names} == {}
