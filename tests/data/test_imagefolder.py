"""Tests of `data=imagefolder`: which images belong to which class, options, batches, and runs of the command."""

import itertools
import json
import logging
import os
from pathlib import Path

import numpy
import pytest
import torch
from helpers.command import run_command
from helpers.runs import only_run
from omegaconf import OmegaConf
from PIL import Image
from torchvision.datasets import ImageFolder

from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.config.options import CONF
from runner.config.schema import build
from runner.data.base import Data
from runner.data.decode import FORMATS
from runner.data.imagefolder import EXTENSIONS, Files, training_and_held_out

CPU = torch.device("cpu")


def component(root: Path, **options) -> Data:
    """Build the data set from its option file, as the command does."""
    node = OmegaConf.to_container(OmegaConf.load(CONF / "data" / "imagefolder.yaml"))
    return build({**node, "root": str(root), "workers": 0} | options, Data, "data")  # pyright: ignore[reportCallIssue]


def paint(root: Path, classes: dict[str, tuple[int, int, int]], count: int, size: int = 12) -> Path:
    """Write `count` noisy images for each class, in the color of the class, and return `root`."""
    generator = numpy.random.default_rng(0)
    for name, color in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = numpy.clip(numpy.array(color) + generator.integers(-30, 31, (size, size, 3)), 0, 255)
            Image.fromarray(pixels.astype(numpy.uint8)).save(root / name / f"{number:03}.png")
    return root


COLORS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}


def test_classes_come_from_the_folder_and_sizes_from_the_options(tmp_path):
    train, held_out = component(paint(tmp_path, COLORS, 10), size=8, holdout=0.3).load()
    assert (len(train), len(held_out), train.shape) == (21, 9, (3, 8, 8))
    assert train.class_names == held_out.class_names == ["blue", "green", "red"]
    (batch,) = held_out.in_order(9, (0, 1), CPU)
    assert batch.targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    brightest = batch.inputs.mean((2, 3)).argmax(1)  # channels: red, green, blue
    assert brightest.tolist() == [2, 2, 2, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("augment", ["none", "flip", "crop"])
def test_only_training_images_are_augmented(tmp_path, augment):
    paint(tmp_path / "train", COLORS, 1, size=32)
    paint(tmp_path / "val", COLORS, 1, size=32)
    train, held_out = component(tmp_path, size=16, augment=augment).load()
    (plain,) = held_out.in_order(3, (0, 1), CPU)
    shown = list(itertools.islice(train.batches(Plan(1).stream(0), 0, CPU), 60))
    variants = {tuple(batch.inputs.flatten().tolist()) for batch in shown}
    assert len(variants) == {"none": 3, "flip": 6, "crop": 60}[augment]
    assert (variants >= {tuple(row.flatten().tolist()) for row in plain.inputs}) == (augment != "crop")


@pytest.mark.cases(
        ("holdout", 0.95), ("augment", "mixup"), ("mean", [0.5]), ("std", [0.1, 0.0, 0.1]),
        ("mean", [0.5, 0.5, 124.0]), ("on_error", "ignore"), ("timeout", float("inf")),
)  # fmt: skip
def test_impossible_options_are_refused(key, value, tmp_path):
    with pytest.raises(ConfigError) as refused:
        component(tmp_path, **{key: value})
    assert refused.value.key == f"data.{key}"


QUICK = ("data=imagefolder", "data.size=8", "model=tiny", "device=cpu", "device.threads=1", "batch_size=12", "epochs=4")


@pytest.mark.parametrize("mode", ["ddp", "ensemble"])
def test_every_mode_says_what_it_leaves_out_and_counts_it_once(tmp_path, mode):
    root = tmp_path / "colors"
    for part, count in (("train", 12), ("val", 8)):
        paint(root / part, COLORS, count)
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
    bad = paint(tmp_path / "colors", COLORS, 20) / "green" / "003.png"
    bad.write_bytes(bad.read_bytes()[:200])
    code, output = run_command(*QUICK, f"data.root={tmp_path / 'colors'}", "data.workers=1", cwd=tmp_path)
    assert code == 1
    assert f"{bad}: it cannot be read" in output
    assert "data.on_error=skip" in output
    assert "Traceback" not in output


def make(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def many(name: str, count: int) -> list[str]:
    return [f"{name}/{number:03}.jpg" for number in range(count)]


def below(root: Path, files: Files) -> dict[str, list[str]]:
    return {name: [os.path.relpath(path, root) for path in paths] for name, paths in files.items()}


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_a_validation_or_test_folder_has_the_held_out_images(tmp_path, name, caplog):
    caplog.set_level(logging.INFO)
    make(tmp_path, "train/b/1.png", "train/a/2.JPG", "train/a/1.jpeg", f"{name}/a/3.webp", f"{name}/b/deep/er/4.png")
    make(tmp_path, "test/b/9.png", "test/a/9.png") if name != "test" else None
    train, held_out = training_and_held_out(tmp_path, 0.5).values()
    assert below(tmp_path, train) == {"a": ["train/a/1.jpeg", "train/a/2.JPG"], "b": ["train/b/1.png"]}
    assert below(tmp_path, held_out) == {"a": [f"{name}/a/3.webp"], "b": [f"{name}/b/deep/er/4.png"]}
    assert list(train) == list(held_out) == ["a", "b"]
    assert f"evaluating on {name}/" in caplog.text
    assert ("test/ is left for evaluate --split test" in caplog.text) == (name != "test")


def test_the_split_of_each_class_does_not_depend_on_the_path_of_the_folder(tmp_path):
    splits = []
    for place in ("here", "there"):
        root = make(tmp_path / place, *many("cat", 100), *many("dog", 10), *many("eel", 2))
        train, held_out = (below(root, files) for files in training_and_held_out(root, 0.2).values())
        splits.append((train, held_out))
        assert {name: len(paths) for name, paths in held_out.items()} == {"cat": 20, "dog": 2, "eel": 1}
        assert {name: len({*train[name], *held_out[name]}) for name in train} == {"cat": 100, "dog": 10, "eel": 2}
    assert splits[0] == splits[1]
    cats = splits[0][1]["cat"]
    assert cats[0] < "cat/020.jpg" < "cat/080.jpg" < cats[-1]  # spread over all file names
    assert {*cats} < {*below(tmp_path / "here", training_and_held_out(tmp_path / "here", 0.5)["val"])["cat"]}


def test_files_that_are_no_images_of_a_class_are_left_out_and_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    hidden = ["b/.DS_Store", "b/._1.jpg", "b/.thumbs/1.jpg", ".git/1.jpg", "__MACOSX/._b"]
    make(tmp_path, *many("a", 2), *many("b", 2), *hidden)
    make(tmp_path, "a/notes.txt", "a/more.txt", "a/README", "labels.csv", "1.png")
    train, held_out = training_and_held_out(tmp_path, 0.5).values()
    assert sum(len(paths) for files in (train, held_out) for paths in files.values()) == 4
    kinds = "5 hidden, 2 .txt, 1 .csv, 1 .png in no class directory, 1 without extension"
    assert {*caplog.messages[0].partition("(")[2].removesuffix(")").split(", ")} == {*kinds.split(", ")}
    assert "ignored 10 files and folders" in caplog.text


def test_all_extensions_of_the_formats_that_are_read_are_found():
    """A JPEG may be named x.jfif or x.jpe, for example."""
    Image.init()
    known = {extension for extension, kind in Image.registered_extensions().items() if kind in FORMATS}
    assert {*EXTENSIONS} == known - {".pfm"}  # whose pixels are floating-point numbers


def test_links_to_classes_are_followed_and_those_to_other_directories_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    make(tmp_path / "elsewhere", *many("cats", 2))
    root = make(tmp_path / "root", *many("dog", 2))
    (root / "cat").symlink_to(tmp_path / "elsewhere" / "cats")
    for name, target in {"back": root / "dog", "up": "..", "further": tmp_path}.items():
        (root / "dog" / name).symlink_to(target)
    (root / "dog" / "loop.jpg").symlink_to("loop.jpg")  # counts as an image, although it cannot be read
    train, held_out = training_and_held_out(root, 0.5).values()
    assert [len(train["cat"] + held_out["cat"]), len(train["dog"] + held_out["dog"])] == [2, 3]
    assert "ignored 3 files and folders (3 linked folders)" in caplog.text


def test_names_that_are_not_utf_8_are_found_and_train_may_be_the_name_of_a_class(tmp_path):
    for name, image in itertools.product((b"a\xff", b"train"), (b"1\xfe.jpg", b"2.jpg", b"3\n.jpg")):
        make(tmp_path, os.fsdecode(name + b"/" + image))
    train, held_out = training_and_held_out(tmp_path, 0.3).values()
    assert [os.fsencode(name) for name in train] == [b"a\xff", b"train"]
    assert [len(paths) for files in (train, held_out) for paths in files.values()] == [2, 2, 1, 1]


BOTH = [f"root/{part}/1.jpg" for part in ("train/a", "train/b", "val/a", "val/b")]
REFUSED: dict[str, tuple[list[str], str, list[str]]] = {  # files, data.root, texts in the reason
    "absent": ([], "nowhere", ["No such file or directory"]),
    "a file": (["file"], "file", ["Not a directory"]),
    "no class": (["root/1.jpg"], "root", ["no class"]),
    "one class": (many("root/only", 3), "root", [" 1 class"]),
    "a class without images": ([*many("root/a", 2), *many("root/b", 2), "root/empty/x.txt"], "root", ["empty"]),
    "train alone": ([*many("root/train/a", 2), *many("root/train/b", 2)], "root", ["train/", "not both"]),
    "val alone": ([*many("root/val/a", 2), *many("root/val/b", 2)], "root", ["val/", "not both"]),
    "no image in val": ([*BOTH[:2], "root/val/a/x.txt"], "root", ["no class"]),
    "a class in val alone": ([*BOTH, "root/val/c/1.jpg"], "root", ["train/", "val/", ": c"]),
    "splits in classes": (
        [f"root/{name}/{part}/1.jpg" for name in "ab" for part in ("Train", "val")],
        "root",
        ["splits are in the class directories: a, b"],
    ),
    "a class of one image": ([*many("root/a", 2), *many("root/b", 1)], "root", ["too few of b"]),
}


@pytest.mark.parametrize("files", [[], ["val/b/x.txt"]])
def test_held_out_images_may_lack_a_class_of_the_training_images(tmp_path, files):
    make(tmp_path, *many("train/a", 2), *many("train/b", 2), *many("train/c", 2), "val/a/1.jpg", "val/c/1.jpg", *files)
    held_out = training_and_held_out(tmp_path, 0.2)["val"]
    assert {name: len(paths) for name, paths in held_out.items()} == {"a": 1, "b": 0, "c": 1}
    assert list(held_out) == ["a", "b", "c"]  # the index of c is that of the training images


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_directory_is_refused_by_key(tmp_path, case):
    names, root, words = REFUSED[case]
    make(tmp_path, *names)
    with pytest.raises(ConfigError) as refused:
        training_and_held_out(tmp_path / root, 0.2)
    assert refused.value.key == "root"
    for word in words:
        assert word in refused.value.why
    assert str(tmp_path / root) in str(refused.value.got)


@pytest.mark.parametrize(("training", "held_out"), [("Training", "Testing"), ("TRAIN", "Val")])
def test_names_of_splits_may_be_written_in_other_ways(tmp_path, training, held_out):
    paint(tmp_path / training, COLORS, 3)
    paint(tmp_path / held_out, COLORS, 2)
    train, val = component(tmp_path).load()
    assert (train.class_names, len(train), len(val)) == (["blue", "green", "red"], 9, 6)
    splits = component(tmp_path).splits({})
    assert [len(splits[name]()) for name in ("train", "all")] == [9, 15]


def test_a_directory_around_the_class_directories_is_named(tmp_path):
    paint(tmp_path / "photos", COLORS, 2)
    with pytest.raises(ConfigError) as refused:
        component(tmp_path).load()
    assert f"data.root={tmp_path / 'photos'}" in refused.value.remedy


def test_classes_whose_names_are_numbers_have_the_indices_of_torchvision(tmp_path):
    for number in range(12):
        (tmp_path / str(number)).mkdir()
        for copy in range(3):
            Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / f"{number}/{copy}.png")
    samples = component(tmp_path, augment="none", size=8).load()[0]
    theirs = ImageFolder(str(tmp_path))
    assert samples.class_names == theirs.classes
    for batch in samples.in_order(99, (0, 1), torch.device("cpu")):
        red = ((batch.inputs[:, 0, 0, 0] * 0.229 + 0.485) * 255 / 20).round().long()
        assert [theirs.classes[label] for label in batch.targets] == [str(number) for number in red.tolist()]
