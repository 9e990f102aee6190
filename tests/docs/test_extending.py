"""Tests of the examples in docs/extending.md, which are in a separate package that is found by its entry point."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.command import ROOT, child_environment, run_successfully
from helpers.plain_loop import largest_difference, weights_at

EXAMPLES = ROOT / "docs" / "examples"
TINY = ("device=cpu", "device.threads=1", "model=tiny", "data.size=8", "steps=2", "batch_size=16")

Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A directory for sys.path that holds the examples' package as pip would install it, with its entry point."""
    directory = tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLES / "my_experiments", directory / "my_experiments")
    info = directory / "my_experiments-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-experiments\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[runner.components]\nmy_experiments = my_experiments\n")
    return directory


def train_in(cwd: Path, site: Path, *overrides: str) -> dict[str, Any]:
    """Train with the examples' options; return the content of `result.json`, and the run directory as `directory`."""
    path = os.pathsep.join([child_environment()["PYTHONPATH"], str(site)])
    run_successfully(cwd, f"--config-dir={EXAMPLES / 'conf'}", *overrides, PYTHONPATH=path)
    file = max(cwd.rglob("result.json"), key=lambda path: path.stat().st_mtime_ns)
    result = json.loads(file.read_text())
    assert result["status"] == "done"
    return result | {"directory": file.parent}


def weights_of(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    return weights_at(result["directory"], result["steps"])


@pytest.fixture
def train(site: Path, tmp_path) -> Train:
    """`train_in` with the temporary directory of the test as the working directory."""
    return partial(train_in, tmp_path, site)


def test_a_mode_of_another_package_computes_what_one_device_computes_and_a_script_reads_the_results(
    site, tmp_path, train
):
    single = train(*TINY, "precision=64", "log_every=1")
    ours = train_in(tmp_path / "ours", site, *TINY, "precision=64", "parallel=all_reduce", "accumulation=2")
    assert (single["world_size"], ours["world_size"]) == (1, 2)
    assert ours["steps"] == single["steps"] == 2
    assert ours["metrics"]["eval/accuracy"] == single["metrics"]["eval/accuracy"]
    assert ours["metrics"]["eval/loss"] == pytest.approx(single["metrics"]["eval/loss"], rel=1e-6)  # summed in float32
    assert largest_difference(weights_of(ours), weights_of(single)) < 1e-12

    # Without the runner
    words = [sys.executable, str(EXAMPLES / "read_results.py"), "outputs"]
    variables = {**os.environ, "PYTHONPATH": ""}
    shown = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True).stdout
    best = f"best={single['best']['value']}"
    assert shown.rstrip("\n").split("\t") == [single["directory"].name, "done", "steps=2", best]
    curves = (single["directory"] / "curves.csv").read_text().splitlines()
    losses = [line.split(",") for line in curves if line.startswith("train/loss,")]
    assert [step for _, step, _ in losses] == ["1", "2"]
    assert float(losses[-1][2]) == pytest.approx(single["metrics"]["train/loss"], rel=1e-6)


def test_a_workload_of_another_package_trains_and_reports_its_loss(train):
    autoencoder = ("workload=autoencoder", "device=cpu", "data.size=8", "steps=2", "batch_size=16", "precision=64")
    single = train(*autoencoder)
    assert single["steps"] == 2
    assert single["best"]["metric"] == "eval/loss"
    # Inputs have a mean of 0 and a variance of 1, so a model that has learned nothing has a loss of about 1.
    assert 0.5 < single["metrics"]["eval/loss"] < 2
    weights = weights_of(single)
    widths = [tuple(tensor.shape) for name, tensor in weights.items() if name.endswith("weight")]
    assert sorted(widths) == sorted([(128, 64), (16, 128), (128, 16), (64, 128)])

    two = train(*autoencoder, "parallel=ddp")
    assert two["world_size"] == 2
    assert two["metrics"]["eval/loss"] == pytest.approx(single["metrics"]["eval/loss"], rel=1e-5)
    assert largest_difference(weights_of(two), weights) < 1e-12


def test_a_data_set_of_another_package_is_learned(train, tmp_path):
    numbers = numpy.random.default_rng(0)
    labels = numbers.integers(2, size=200)
    images = numbers.integers(0, 100, (200, 3, 8, 8)) + 150 * labels[:, None, None, None]  # dark or bright
    numpy.savez(tmp_path / "images.npz", images=images.astype(numpy.uint8), labels=labels)
    arrays = ("data=arrays", "data.file=images.npz", "device=cpu", "model=tiny", "batch_size=16")
    assert train(*arrays, "steps=60", "data.flip=true")["metrics"]["eval/accuracy"] == 1.0


def test_an_agent_trains_in_an_environment_of_another_package(train):
    sizes = ("batch_size=8", "steps=2", "workload.warm_up=48", "workload.replay_size=100", "workload.eval_episodes=2")
    result = train("workload=dqn", "env=corridor", "device=cpu", *sizes)
    assert result["steps"] == 2
    assert -50 <= result["metrics"]["eval/return"] <= -1


def test_a_tracker_of_another_package_gets_every_point_once(train):
    first = train(*TINY, "tracking=csv", "log_every=1", "save_every=1")
    file = first["directory"] / "curves.csv"
    losses = [line for line in file.read_text().splitlines() if ",train/loss," in line]
    assert [line.split(",")[0] for line in losses] == ["1", "2"]
    assert float(losses[-1].split(",")[2]) == pytest.approx(first["metrics"]["train/loss"], rel=1e-6)

    resumed = train(f"resume={first['directory'] / 'checkpoints' / 'step_00000001'}")
    assert resumed["directory"] == first["directory"]
    assert [line for line in file.read_text().splitlines() if ",train/loss," in line] == losses
    assert not list(first["directory"].glob("events.*")), "this tracker stands in the place of TensorBoard's"
