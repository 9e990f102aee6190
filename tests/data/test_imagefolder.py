"""Tests of `data=imagefolder`: options, batches, and runs of the command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy
import pytest
import torch
from helpers.command import run_command
from helpers.runs import only_run
from omegaconf import OmegaConf
from PIL import Image

from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.config.options import CONF
from runner.config.schema import build
from runner.data.base import Data

CPU = torch.device("cpu")


def component(root: Path, **options) -> Data:
    """Build the data set from its option file, as the command does."""
    node = OmegaConf.to_container(OmegaConf.load(CONF / "data" / "imagefolder.yaml"))
    return build({**node, "root": str(root), "workers": 0} | options, Data, "data")  # pyright: ignore[reportCallIssue]


def paint(root: Path, classes: dict[str, tuple[int, int, int]], count: int, size: int = 12) -> Path:
    """Write `count` noisy images for each class, in the color of the class, and return `root`."""
    generator = numpy.random.default_rng(0)
    for name, colour in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = numpy.clip(numpy.array(colour) + generator.integers(-30, 31, (size, size, 3)), 0, 255)
            Image.fromarray(pixels.astype(numpy.uint8)).save(root / name / f"{number:03}.png")
    return root


COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}


def test_classes_come_from_the_folder_and_sizes_from_the_options(tmp_path):
    train, held_out = component(paint(tmp_path, COLOURS, 10), size=8, holdout=0.3).load()
    assert (len(train), len(held_out)) == (21, 9)
    assert train.class_names == held_out.class_names == ["blue", "green", "red"]
    assert train.num_classes == 3
    assert train.shape == (3, 8, 8)
    (batch,) = held_out.in_order(9, (0, 1), CPU)
    assert batch.targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    brightest = batch.inputs.mean((2, 3)).argmax(1)  # channels: red, green, blue
    assert brightest.tolist() == [2, 2, 2, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("augment", ["none", "flip", "crop"])
def test_only_training_images_are_augmented(tmp_path, augment):
    paint(tmp_path / "train", COLOURS, 1, size=32)
    paint(tmp_path / "val", COLOURS, 1, size=32)
    train, held_out = component(tmp_path, size=16, augment=augment).load()
    (plain,) = held_out.in_order(3, (0, 1), CPU)
    shown = list(itertools.islice(train.batches(Plan(1).stream(0), 0, CPU), 60))
    variants = {tuple(batch.inputs.flatten().tolist()) for batch in shown}
    assert {"none": len(variants) == 3, "flip": len(variants) == 6, "crop": len(variants) == 60}[augment]
    for row, target in zip(plain.inputs, plain.targets, strict=True):
        if augment != "crop":
            assert any(torch.equal(row, batch.inputs[0]) for batch in shown if batch.targets[0] == target)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", 0), ("holdout", 0.95), ("augment", "mixup"), ("mean", [0.5]), ("std", [0.1, 0.0, 0.1]),
        ("mean", [0.5, 0.5, 124.0]), ("on_error", "ignore"), ("timeout", float("inf")), ("pin_memory", "perhaps"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(tmp_path, key, value):
    with pytest.raises(ConfigError) as refused:
        component(tmp_path, **{key: value})
    assert refused.value.key == f"data.{key}"


# ---------------------------------------------------------------------------------------------------------------------
# Runs of the command

QUICK = ("data=imagefolder", "data.size=8", "model=tiny", "device=cpu", "device.threads=1", "batch_size=12", "epochs=4")


def damaged(root: Path) -> Path:
    paint(root, COLOURS, 20)
    bad = root / "green" / "003.png"
    bad.write_bytes(bad.read_bytes()[:200])
    return bad


@pytest.mark.parametrize("mode", ["ddp", "ensemble"])
def test_every_mode_says_what_it_leaves_out_and_counts_it_once(tmp_path, mode):
    root = tmp_path / "colours"
    for part, count in (("train", 12), ("val", 8)):
        paint(root / part, COLOURS, count)
        (root / part / "blue" / ".hidden.png").touch()
        (root / part / "red" / "notes.txt").touch()
    bad = ["train/blue/004.png", "val/blue/000.png", "val/green/003.png", "val/green/004.png", "val/red/007.png"]
    for name in bad:  # in the shards of both processes
        (root / name).write_bytes(b"no image")
    words = (*QUICK, f"data.root={root}", "data.workers=0", "data.on_error=skip", f"parallel={mode}", "epochs=1")
    code, output = run_command(*words, cwd=tmp_path)
    assert code == 0, output
    run = only_run(tmp_path)
    notes = json.loads((run / "result.json").read_text())["notes"]
    assert (notes["skipped_images"], sorted(notes["skipped_files"])) == (5, [str(root / name) for name in bad])
    ignored = "ignored 2 files and folders (1 hidden, 1 .txt)"
    said = [f"{root}: training on train/, evaluating on val/", f"{root}: train/: {ignored}", f"{root}: val/: {ignored}"]
    assert [output.count(line) for line in said] == [1, 1, 1]
    logged = (run / "log.txt").read_text()
    assert [logged.count(line) for line in (*said, *(f"skipped {root / name}: " for name in bad))] == [1] * 8


def test_the_command_ends_at_a_damaged_file_without_a_traceback(tmp_path):
    bad = damaged(tmp_path / "colours")
    code, output = run_command(*QUICK, f"data.root={tmp_path / 'colours'}", "data.workers=1", cwd=tmp_path)
    assert code == 1
    assert f"{bad}: it cannot be read" in output
    assert "data.on_error=skip" in output
    assert "Traceback" not in output
