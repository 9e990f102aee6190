"""Tests of the command with arguments as users type them; most mistakes are reported without importing torch."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import command as cli
from helpers.compose import TINY_CPU

# Arguments, separated by two spaces, and texts that the output must contain. A line must begin with the first text,
# which is the wrong key or argument.
REFUSED = {
    # Misspelled keys and options
    "optimizer.lrr=1": ["optimizer.lrr:", "did you mean optimizer.lr?"],
    "seeed=1": ["seeed:", "did you mean seed"],
    "+foo=3": ["foo:", "accumulation, ", "debug, ", "sweep, "],
    "schedule.milestones=[0.5]": ["schedule.milestones:", "a key of schedule=step; another schedule is chosen"],
    "accumulation=3": ["accumulation: got '3'", "accumulation.steps=3"],
    "precision=17": ["precision: got '17'", "16, 32, 64, bf16, tf32"],
    "+precision=16": ["precision:", "Multiple values for precision"],
    "data.zzz=1": ["data.zzz:", "choose from: data."],
    "schedule.milestons=[0.5]": ["schedule.milestons:", "did you mean schedule.milestones?"],
    "device=gpu": ["device: got 'gpu'", "choose device=cuda (NVIDIA or AMD), device=mps"],
    "ema=0.99": ["ema: got '0.99'", "no such option", "set its keys: ema.decay; for example: ema.decay=0.99"],
    "stop=true": ["stop: got 'true'", "for example: stop.metric=eval/accuracy stop.patience=5"],
    "~optimizer": ["optimizer: got null", "nothing is chosen"],
    "~optimizer.lr": ["optimizer.lr: it has no value", "give it one; see the comments in conf/optimizer/sgd.yaml"],
    # Keys of other libraries
    "lr=0.1": ["lr:", "type optimizer.lr=…"],
    "trainer.max_epochs=3": ["trainer.max_epochs:", "type epochs=…"],
    "--per-device-train-batch-size=4": ["--per-device-train-batch-size:", "type batch_size=…"],
    "hydra/sweeper=optuna": ["hydra/sweeper: got 'optuna'", "type sweep.search=tpe"],
    # Names and paths
    "name=\x1b[31mred": ["name: got '\\x1b[31mred'", "directory's name"],
    "resume=/nowhere": ["resume: got '/nowhere'", "no such directory", "auto, never, or a run directory"],
    # Arguments that are not valid overrides or flags
    "optimizer.lr=[1": ["optimizer.lr=[1:", "pairs"],
    "name=${seed": ["name=${seed:", "pairs"],
    "name=${nope}": ["name:", "'nope' not found", "a plain value"],
    "evalute  out": ["evalute: there is no such subcommand", "did you mean evaluate?"],
    "-m  ddp": ["ddp: there is no such key", "parallel=ddp"],
    "optimizer": ["optimizer: it has no value", "KEY=VALUE", "optimizer=adam, optimizer=adamw, optimizer="],
    "--cfg  jobb": ["--cfg", "'jobb'", "choose from"],
    "-m  --cfg  job": ["--cfg:", "not allowed with argument --multirun"],
    "--config-dir=/nowhere": ["--config-dir: got '/nowhere'", "no such directory"],
    # Sweeps, and sweeps typed without -m
    "optimizer.lr=1,2": ["optimizer.lr: got '1,2'", "for a sweep, add -m (in Python: runner.sweep)", "in brackets"],
    "-m  sweep=here": ["sweep: got 'here'", "local"],
    "sweep.slots=2": ["sweep.slots:", "add -m"],
    "-m  schedule=onecycle,cosine  schedule.gamma=0.5": ["schedule.gamma:", "a key of schedule=plateau, schedule=step"],
    "-m  optimizer.lr=interval(1,2)": ["optimizer.lr: got 'interval(1,2)'", "optimizer.lr=1,2,3"],
    # Errors that Hydra reports without the key
    "+seed=1": ["seed:", "already at 'seed'"],
    "~model=qnet": ["model: got 'qnet'", "Could not delete", "leave ~model out"],
    "model.channels.optimizer.fused=1": ["model.channels.optimizer.fused: got '1'"],
    "model=../x": ["model: got '../x'"],
    f"seed={'9' * 5000}": ["seed: got '999", "limit"],
    # Run directory
    "seed=1  --run-directory=": ["--run-directory: it has no value", "--run-directory=DIR"],
    "-m  seed=0,1  --run-directory=x": ["--run-directory: got 'x'", "a sweep chooses"],
}


def refusal(arguments: list[str], cwd: Path, kind: str) -> str:
    """Run a command, check what every refusal has in common, and return what the command printed."""
    code, output = cli.run_command(*arguments, cwd=cwd, kind=kind)
    assert code == 2, output
    assert "Traceback" not in output
    assert len(output.strip().splitlines()) <= 10, output
    assert cli.names_left_in(cwd) == set(), "nothing is left behind"
    return output


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_refused_without_torch_and_leaves_no_files(line, tmp_path):
    output = refusal(line.split("  "), tmp_path, "no-torch")
    assert any(text.startswith(REFUSED[line][0]) for text in output.splitlines()), output
    for words in REFUSED[line]:
        assert words in output


# Mistakes that are found only after torch is imported, which has the data, the devices and the names of weights.
REFUSED_LATER = {
    "model=resnet18  data.size=32  device=cpu  steps=1  batch_size=1": ["batch_size: got 1:", "model.norm=group"],
    "batch_size=999999": ["batch_size: got 999999", "1438 training samples", "at most batch_size=1438"],
    "model.weights=/nowhere.pt": ["model.weights: got '/nowhere.pt'", "no such file"],
    "data.size=8": ["model.kernel_size: got 5", "too small", "model=tiny"],
    "device.index=99": ["device.index: got 99"],
    "output_root=/dev/null": ["output_root: got '/dev/null", "Not a directory", "choose another with output_root=DIR"],
    "output_root=/proc/here": ["output_root: got '/proc/here", "choose another with output_root=DIR"],
    "-m  output_root=/proc/here  seed=1,2": ["output_root: got '/proc/here", "choose another with output_root=DIR"],
}
if not torch.cuda.is_available():
    REFUSED_LATER["device=cuda"] = ["device.kind: got 'cuda'", "no CUDA device", "device=auto"]


@pytest.mark.parametrize("line", REFUSED_LATER)
def test_a_mistake_found_in_data_or_device_is_refused_and_leaves_no_files(line, tmp_path):
    output = refusal(line.split("  "), tmp_path, "ranks")
    for words in REFUSED_LATER[line]:
        assert words in output


def test_a_deleted_current_directory_is_refused_without_a_traceback(tmp_path):
    (tmp_path / "gone").mkdir()
    words = ["sh", "-c", 'rmdir ../gone && exec "$0" -m runner seed=1', sys.executable]
    done = subprocess.run(words, cwd=tmp_path / "gone", env=cli.child_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("current directory: it cannot be read")
    assert len(done.stderr.splitlines()) == 2


def test_a_python_without_the_packages_is_told_how_to_install_them():
    done = subprocess.run([sys.executable, "-S", "-m", "runner"], cwd=cli.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    why, remedy = done.stderr.splitlines()
    assert why.startswith(f"{sys.executable} has no torch, torchvision, hydra, omegaconf")
    assert remedy.endswith(f"{sys.executable} -m pip install -e {cli.ROOT}")


GLOBAL = "# @package _global_\n"
# An option file in the directory of --config-dir, its content, what chooses it, and texts that the output must contain.
REFUSED_FILES = [
    ("local/default", f"{GLOBAL}seed: 016\n", [], ["seed: got '016'", "a whole number"]),
    ("local/default", f"{GLOBAL}name: !!python/object/apply:os.system [ls]\n", [], ["default.yaml:", "line 2"]),
    ("local/default", f"{GLOBAL}seed: [\n", [], ["mine/local/default.yaml:", "not valid YAML in line"]),
    ("experiment/odd", "", ["experiment=odd"], ["experiment: ", GLOBAL.strip()]),
    ("debug/odd", "seed: 3\n", ["debug=odd"], ["debug: ", GLOBAL.strip()]),
]


@pytest.mark.parametrize(("file", "content", "words", "texts"), REFUSED_FILES)
def test_a_mistake_in_an_option_file_is_refused_without_torch(file, content, words, texts, tmp_path):
    path = tmp_path / "mine" / f"{file}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    output = refusal([f"--config-dir={tmp_path / 'mine'}", *words], tmp_path / "here", "no-torch")
    for text in texts:
        assert text in output


def test_cfg_prints_the_composed_config_as_it_is_saved_without_torch(tmp_path):
    words = ("seed=1", "--cfg", "job", "precision=16", "accumulation=4", "name=${seed}-${oc.env:SECRET}")
    code, output = cli.run_command(*words, cwd=tmp_path, kind="no-torch", SECRET="s")
    shown = yaml.safe_load(output)
    assert (code, shown["precision"]["_target_"]) == (0, "runner.precision.Float16")
    assert (shown["accumulation"]["steps"], shown["seed"], shown["name"]) == (4, 1, "1-s")


def test_a_closed_pipe_on_stdout_is_not_an_error(tmp_path):
    """For example, with `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    process = cli.start_in_new_interpreter(*TINY_CPU, "steps=1", cwd=tmp_path, stdout=writing)
    os.close(writing)
    _, output = process.communicate(timeout=cli.TIMEOUT_SECONDS)
    assert (process.returncode, "Broken" in output, "Traceback" in output) == (0, False, False), output


def test_a_run_has_a_labeled_directory_with_the_composed_config(tmp_path):
    words = ("precision=16", "accumulation=4", "steps=2", *TINY_CPU, "name=a b")
    code, output = cli.run_command(*words, cwd=tmp_path)
    assert code == 0, output
    [path] = tmp_path.glob("outputs/a b/*")
    typed = ["precision='16'", "accumulation='4'", "steps=2", *TINY_CPU, "name='a b'"]
    assert yaml.safe_load((path / "overrides.yaml").read_text()) == typed
    saved = yaml.safe_load((path / "config.yaml").read_text())
    assert (saved["precision"]["_target_"], saved["accumulation"]["steps"]) == ("runner.precision.Float16", 4)
    typed = "-precision=16+accumulation=4+model=tiny+steps=2+data.size=8"
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{{6}}{re.escape(typed)}", path.name)
    assert f"run: 'outputs/a b/{path.name}'\n" in output


def test_a_sweep_has_a_labeled_directory_for_each_job_and_no_other_files(tmp_path):
    typed = ("-m", "precision=16,32", "name=a,b c", "output_root=y=z")
    code, output = cli.run_command(*TINY_CPU, "steps=1", *typed, cwd=tmp_path)
    assert code == 0, output
    [sweep] = tmp_path.glob("y=z/sweeps/a/*")
    swept = [f"precision={precision},name={name}" for precision in ("16", "32") for name in ("a", "b_c")]
    labels = [f"{i:03d}-{label}" for i, label in enumerate(swept)]
    [summary] = sweep.glob("events.out.tfevents.*")
    assert sorted(path.name for path in sweep.iterdir()) == [".lock", *labels, "console", summary.name, "sweep.json"]
    assert re.search(
        r"^best eval/accuracy \d\.\d+ ± \d\.\d+, the mean of 2 runs \(1 seed\): precision=", output, re.MULTILINE
    )
    assert f"look: tensorboard --logdir y=z/sweeps/a/{sweep.name}\n" in output
    configs = [yaml.safe_load((sweep / label / "config.yaml").read_text()) for label in labels]
    classes = [config["precision"]["_target_"].rpartition(".")[2] for config in configs]
    assert classes == ["Float16", "Float16", "Precision", "Precision"]
    assert [config["name"] for config in configs] == ["a", "b c", "a", "b c"]
    assert cli.names_left_in(tmp_path) == {"y=z"}


def test_a_job_that_is_killed_is_resumed_and_one_that_is_refused_or_diverges_does_not_end_the_others(tmp_path):
    words = (*TINY_CPU, "-m", "optimizer.weight_decay=0,-1,1000", "steps=60", "save_every=20", "eval_every=0")
    gate = f"50:{tmp_path / 'go'}"
    command = cli.Command(tmp_path, *words, "log_every=5", "sweep.retries=1", STEP_GATE=gate)
    cli.wait_until(lambda: cli.glob(tmp_path, "outputs/sweeps/*/*/000-*/checkpoints/step_????????"))
    [job] = tmp_path.glob("outputs/sweeps/*/*/000-*")
    command.signal_processes(signal.SIGKILL, cli.process_that_runs(job))
    (tmp_path / "go").touch()
    code, output = command.wait()
    assert code == 2, output
    assert "was killed by SIGKILL" in output
    assert "optimizer.weight_decay: got -1:" in output
    assert "Traceback" not in output
    jobs = json.loads((job.parent / "sweep.json").read_text())["jobs"]
    assert {number: entry["state"] for number, entry in jobs.items()} == {"0": "done", "1": "refused", "2": "diverged"}
    results = (json.loads(file.read_text()) for file in job.parent.glob("*/result.json"))
    assert sorted(result["status"] for result in results) == ["diverged", "done"]


def test_secrets_in_the_overrides_of_a_sweep_are_neither_printed_nor_written(tmp_path):
    secret = ("data=synthetic", "+data.token=s3cret", "seed=1,2", "steps=1")
    code, console = cli.run_command(*TINY_CPU, "-m", *secret, "name=https://ann:s3cret@host", cwd=tmp_path)
    assert code == 2, console  # there is no such option
    assert "***" in console
    assert "s3cret" not in console
    for path in tmp_path.rglob("*"):
        assert "s3cret" not in path.name
        assert path.name == "console.txt" or not path.is_file() or b"s3cret" not in path.read_bytes(), path
