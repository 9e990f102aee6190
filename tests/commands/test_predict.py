"""Tests of `runner predict`: the table, CSV and JSON, and the refusal of mistakes."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_edits import rewrite_manifest
from helpers.compose import TINY_CPU
from helpers.runs import write_images

import runner
from runner.api.saved import image_files
from runner.commands import predict


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A directory with a run on two classes of images, and a file `photos/val/broken.png` that is not an image."""
    root = tmp_path_factory.mktemp("predict")
    write_images(root / "photos")
    data = ("data=imagefolder", f"data.root={root / 'photos'}", "data.size=8", "data.workers=0")
    runner.train([*TINY_CPU, *data, "batch_size=8", "steps=4", f"output_root={root / 'outputs'}"])
    (root / "photos/val/broken.png").write_text("no image")
    return root


@pytest.fixture
def run(original: Path, tmp_path, monkeypatch) -> runner.SavedRun:
    """A copy of the run and the images in the working directory."""
    monkeypatch.chdir(shutil.copytree(original, tmp_path / "copy"))
    [directory] = Path("outputs").glob("*/*")
    return runner.load(directory)


def test_the_table_csv_and_json_have_every_prediction(run, capsys):
    shown = []
    for form in ([], ["--csv"], ["--json"]):
        assert predict.main([str(run.directory), "photos/val", *form]) == 0
        shown.append(capsys.readouterr().out)
    (broken, *lines), table, rows = shown[0].splitlines(), csv.DictReader(shown[1].splitlines()), json.loads(shown[2])
    wanted = run.predict("photos/val")
    assert [tuple(row.values()) for row in rows] == [(e.file, e.label, e.probability, e.error) for e in wanted]
    assert [{**row, "probability": float(row["probability"])} for row in table] == rows
    assert broken.split(None, 1)[1].startswith("photos/val/broken.png: ValueError: it is not an image")
    assert predict.main([str(run.directory), "photos/val/broken.png"]) == 2
    assert [line.split() for line in lines] == [[e.label, f"{e.probability:.1%}", e.file] for e in wanted[1:]]


def test_the_next_classes_and_all_probabilities_are_those_of_the_model(run, capsys):
    files = ["photos/val/cat", "photos/val/broken.png"]
    model, read = run.model("best"), run.image_input("best")
    paths = sorted(Path("photos/val/cat").iterdir())
    with torch.inference_mode():
        wanted = model(read.normalized(torch.stack([read.read(str(path)) for path in paths]))).softmax(1)
    assert predict.main([str(run.directory), *files, "--csv", "--top", "999999999", "--probabilities"]) == 0
    *rows, broken = csv.DictReader(capsys.readouterr().out.splitlines())
    for name, of_class in zip(("cat", "dog"), wanted.T, strict=True):
        assert [float(row[f"probability of {name}"]) for row in rows] == pytest.approx(of_class.tolist(), abs=1e-6)
    for row, probabilities in zip(rows, wanted, strict=True):
        order = ["cat", "dog"] if probabilities[0] > probabilities[1] else ["dog", "cat"]
        assert ([row["class"], row["class 2"]], "class 3" in row) == (order, False)
        assert float(row["probability 2"]) == pytest.approx(float(probabilities.min()), abs=1e-6)
    assert {row["file"] for row in rows} == {str(path) for path in paths}
    assert broken["error"]
    assert {broken[key] for key in ("class 2", "probability 2", "probability of cat")} == {""}
    assert predict.main([str(run.directory), *files, "--top", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f"({rows[0]['class 2']} {wanted[0].min():.1%})")


def test_class_names_are_escaped_in_the_terminal_and_in_csv(run, capsys):
    path = run.checkpoint("best")
    signature = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text(json.dumps(signature | {"classes": ["=1\x1b[31ma\nb\ud800", "=2" + "x" * 90_000]}))
    rewrite_manifest(path)
    assert predict.main([str(run.directory), "photos/val"]) == 0
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "\x1b" not in shown
    assert all(len(line) < 400 for line in shown.splitlines())
    assert predict.main([str(run.directory), "photos/val", "--csv"]) == 0
    classes = {row["class"] for row in csv.DictReader(capsys.readouterr().out.splitlines()) if row["class"]}
    assert {name[:2] for name in classes} == {"'="}, "no formula either"


def test_mistakes_are_refused_with_the_key(run, capsys):
    Path("empty").mkdir()
    for words, key in {
        ("empty",): "FILES",
        ("nowhere.png",): "FILES",
        ("photos/val", "--checkpoint", "3"): "--checkpoint",
        ("photos/val", "--top", "0"): "--top",
        ("photos/val", "--probabilities"): "--probabilities",
    }.items():
        assert predict.main([str(run.directory), *words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"\n{key}: " in f"\n{captured.err}"


def test_only_images_that_are_not_hidden_are_found_in_a_directory(tmp_path):
    for name in ("a/1.png", "2.JPE", "._3.png", ".ipynb_checkpoints/4.png", "__MACOSX/5.png", "6.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert image_files([tmp_path]) == [str(tmp_path / "2.JPE"), str(tmp_path / "a" / "1.png")]


def test_the_rows_of_a_table_without_targets_are_predicted_in_its_units(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [(i, (7 * i) % 11) for i in range(40)]
    Path("train.csv").write_text("a,b,y\n" + "".join(f"{a},{b},{1000 + 3 * a - b}\n" for a, b in rows))
    words = ["workload=regression", "data=tabular", "data.file=train.csv", "device=cpu", "batch_size=8"]
    run = runner.load(runner.train([*words, "steps=20"]).directory)
    Path("new.csv").write_text('b,"note",a\n3,"two\nlines",5\n\n1,x,20\n')
    inputs, scale = torch.tensor([[5.0, 3.0], [20.0, 1.0]]), run.signature()["scale"]
    mean, std = (torch.tensor(scale["inputs"][key]) for key in ("mean", "std"))
    with torch.no_grad():
        outputs = run.model()((inputs - mean) / std)
    wanted = (outputs * scale["targets"]["std"][0] + scale["targets"]["mean"][0]).flatten().tolist()
    found = run.predict("new.csv")
    assert [(each.file, each.line) for each in found] == [("new.csv", 2), ("new.csv", 5)]
    assert [each.values["y"] for each in found] == pytest.approx(wanted, rel=1e-5)
    for form in ("--csv", "--json"):
        assert predict.main([str(run.directory), "new.csv", form]) == 0
        text = capsys.readouterr().out
        table = json.loads(text) if form == "--json" else [*csv.DictReader(text.splitlines())]
        assert [(int(row["line"]), float(row["y"])) for row in table] == [(e.line, e.values["y"]) for e in found]
    assert predict.main([str(run.directory), "new.csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"y {e.values['y']:.6g}  new.csv:{e.line}" for e in found]
    Path("less.csv").write_text("a,c\n1,2\n")
    with pytest.raises(runner.ConfigError, match=r"lacks the columns b(?s:.*): it has a, c"):
        run.predict("less.csv")
    with pytest.raises(runner.ConfigError, match=r"\.tsv files"):
        run.predict("photo.png")
