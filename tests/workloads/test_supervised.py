"""A resumed run compares its data with that of the checkpoint: names, samples and normalization."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.compose import TINY_CPU
from helpers.runs import checkpoint_tensors
from PIL import Image

import runner
from runner.config.errors import ConfigError
from runner.data.imagefolder import fingerprint

pytestmark = pytest.mark.usefixtures("elsewhere")
PHOTOS = (*TINY_CPU, "data=imagefolder", "data.root=photos", "data.workers=0", "batch_size=8")
TABLE = ("workload=regression", "data.file=table.csv", "model.hidden=[8]", "batch_size=16", "device=cpu")


def write_photo(path: str, seed: int) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pixels = numpy.random.default_rng(seed).integers(256, size=(8, 8, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(path)


def write_table(columns: str, count: int = 60) -> None:
    random = numpy.random.default_rng(0)  # the first rows do not depend on the count
    cells = [dict(zip("uvy", random.uniform(-1, 1, 3).round(6), strict=True)) for _ in range(count)]
    rows = (",".join(str(row[name]) for name in columns.split(",")) for row in cells)
    Path("table.csv").write_text("\n".join([columns, *rows]))


def trained(*overrides: str) -> Path:
    return runner.train([*overrides, "steps=4"]).directory


def signature(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / f"checkpoints/step_{step:08d}/model.json").read_text())


def refusal(run: Path, *overrides: str) -> ConfigError:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError) as refused:
        runner.train([f"resume={run}", "steps=8", *overrides])
    now = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert now == before
    return refused.value


@pytest.fixture
def photos() -> Path:
    for i, name in enumerate(("apple", "berry", "cress")):
        for j in range(8):
            write_photo(f"photos/{name}/{j}.png", 8 * i + j)
    return trained(*PHOTOS)


def test_other_classes_are_refused_with_both_lists(photos):
    Path("photos/apple").rename("photos/red_apple")
    for overrides in (("parallel=single",), ("parallel=ddp", "data.changed=accept")):
        error = refusal(photos, *overrides)
        assert error.key == "data"
        assert "classes apple, berry, cress, and this data has berry, cress, red_apple" in error.why


def test_other_images_are_refused_until_they_are_accepted_for_one_session(photos):
    original = Path("photos/apple/1.png").read_bytes()
    Image.new("RGB", (9, 9)).save("photos/apple/1.png")  # the number of images stays the same
    assert "18 training and 6 held-out samples then" in refusal(photos).why
    Path("photos/apple/1.png").write_bytes(original)
    write_photo("photos/apple/99.png", 99)
    error = refusal(photos)
    assert (error.key, "data.changed=accept" in error.remedy) == ("data", True)
    assert "18 training and 6 held-out samples then" in error.why
    resume = f"resume={photos}"
    assert runner.train([resume, "steps=6", "data.changed=accept"]).steps == 6
    assert "WARNING runner.saved_state: the data has changed" in (photos / "log.txt").read_text()
    assert runner.train([resume, "steps=7"]).steps == 7, "they are now the samples of the checkpoint"
    write_photo("photos/berry/99.png", 100)
    assert refusal(photos).key == "data", "the saved config accepts nothing"


def test_a_directory_has_the_same_fingerprint_everywhere(tmp_path):
    def of(root: str, name: str) -> str:
        return fingerprint(tmp_path / root, [{"a": [str(tmp_path / root / "a" / name)]}])

    for root in ("one", "two"):
        write_photo(f"{root}/a/b.png", 1)
    assert of("one", "b.png") == of("two", "b.png")
    Path("two/a/b.png").rename("two/a/c.png")
    assert of("one", "b.png") != of("two", "c.png")


def test_a_table_that_has_grown_keeps_the_scale_of_the_checkpoint():
    write_table("u,v,y")
    run = trained(*TABLE)
    saved = signature(run, 4)
    assert saved["data"] | {"sha256": ""} == {"training": 48, "held_out": 12, "sha256": ""}
    write_table("u,v,y", 90)
    assert "48 training and 12 held-out samples then, 72 training and 18 held-out" in refusal(run).why
    runner.train([f"resume={run}", "steps=8", "parallel=ddp", "data.changed=accept"])
    now = signature(run, 8)
    assert now["scale"] == saved["scale"]
    assert now["data"]["training"] == 72


def test_columns_in_another_order_are_matched_by_name_and_others_refused_with_both_lists():
    write_table("u,v,y")
    options = [*TABLE, "epochs=null", "schedule=constant"]
    whole = runner.train([*options, "steps=8"]).directory
    run = trained(*options)
    write_table("v,y")
    assert "columns u, v, and this data has v" in refusal(run).why
    write_table("u,v,y")
    Path("table.csv").write_text(Path("table.csv").read_text().replace("u,v,y", "u,v,z"))
    assert "targets y, and this data has z" in refusal(run).why
    write_table("v,u,y")
    runner.train([f"resume={run}", "steps=8"])
    wanted, found = checkpoint_tensors(whole), checkpoint_tensors(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert signature(run, 8) == signature(whole, 8)


def test_data_that_has_been_moved_is_recognized_and_other_data_refused(photos):
    write_table("u,v,y")
    table = trained(*TABLE)
    for place in ("photos", "table.csv"):
        Path(place).rename(f"moved_{place}")

    assert runner.train([f"resume={photos}", "steps=6", "data.root=moved_photos"]).status == "done"
    assert runner.train([f"resume={table}", "steps=6", "data.file=moved_table.csv"]).status == "done"

    write_photo("moved_photos/apple/new.png", 99)
    write_table("u,v,y", count=80)
    assert "25 training" not in (why := refusal(photos, "data.root=moved_photos").why)
    assert "not the samples of the checkpoint" in why
    assert "not the samples of the checkpoint" in refusal(table, "data.file=table.csv").why
