"""Evaluations on other data: which samples, columns and normalization. The wanted values are NumPy's and PIL's."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.compose import TINY_CPU
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms.v2 import functional as transforms

import runner
from runner.api.evaluation import evaluate_checkpoint
from runner.config.errors import ConfigError
from runner.data.tabular import Tabular

pytestmark = pytest.mark.usefixtures("elsewhere")
IMAGES = ("data=imagefolder", "data.root=photos", "data.size=8", "data.center=1", "data.workers=0", "batch_size=8")
TABLE = ("workload=regression", "data.file=train.csv", "model.hidden=[8]", "batch_size=32", "device=cpu")
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
COLORS = {"apple": (220, 30, 30), "berry": (30, 30, 220), "cress": (30, 200, 30)}


def write_photos(root: str, counts: dict[str, int], seed: int = 0) -> None:
    random = numpy.random.default_rng(seed)
    for name, count in counts.items():
        Path(root, name).mkdir(parents=True)
        for i in range(count):
            pixels = (numpy.array(COLORS[name]) + random.integers(-90, 90, (8, 8, 3))).clip(0, 255)
            Image.fromarray(pixels.astype(numpy.uint8)).save(Path(root, name, f"{i:02}.png"))


def write_table(path: str, low: float, count: int, columns: str) -> dict[str, numpy.ndarray]:
    u, v = numpy.random.default_rng(count).uniform(low, low + 2, (2, count)).round(6)
    cells: dict[str, Any] = {"u": u, "v": v, "y": (5 * u - v * v).round(6), "note": numpy.full(count, "text")}
    rows = zip(*(cells[name] for name in columns.split(",")), strict=True)
    Path(path).write_text("\n".join([columns, *(",".join(map(str, row)) for row in rows)]))
    return cells


def trained(*overrides: str) -> runner.SavedRun:
    return runner.load(runner.train(list(overrides)).directory)


def wanted_of_images(run: runner.SavedRun, *files: Path) -> dict[str, float]:
    model = run.model("last")
    model.load_state_dict(load_file(run.checkpoint("last") / "model.safetensors"))
    inputs = [transforms.pil_to_tensor(Image.open(file).convert("RGB")).float() / 255 for file in files]
    targets = torch.tensor([sorted(COLORS).index(file.parent.name) for file in files])
    with torch.inference_mode():
        outputs = model(transforms.normalize(torch.stack(inputs), MEAN, STD))
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    return {"eval/loss": float(loss), "eval/accuracy": float((outputs.argmax(1) == targets).double().mean())}


def test_another_table_is_matched_by_name_and_scaled_like_the_training_data():
    write_table("train.csv", -3, 200, "u,v,y")
    cells = write_table("other.csv", 1, 90, "note,y,v,u")
    run = trained(*TABLE, "epochs=10")
    train, _ = Tabular(file="train.csv", standardize=False).load()
    [(inputs, targets)] = train.in_order(999, (0, 1), torch.device("cpu"))
    scales = [(each.double().mean(0), each.double().std(0, correction=0)) for each in (inputs, targets)]
    rows = torch.from_numpy(numpy.stack((cells["u"], cells["v"]), 1))
    with torch.inference_mode():
        outputs = run.model("last")(((rows - scales[0][0]) / scales[0][1]).float())
    errors = (outputs.double() * scales[1][1] + scales[1][0])[:, 0].numpy() - cells["y"]
    for parallel in ("single", "ddp"):
        found = run.evaluate("last", ["data.file=other.csv", f"parallel={parallel}"])
        assert found["eval/mae"] == pytest.approx(abs(errors).mean(), rel=1e-5)
        assert found["eval/r2"] == pytest.approx(1 - (errors**2).mean() / cells["y"].var(), rel=1e-5)

    write_table("lacking.csv", -3, 100, "u,y")
    with pytest.raises(ConfigError) as refused:
        run.evaluate("last", ["data.file=lacking.csv"])
    assert refused.value.key == "data.file"
    assert "u, v, y: v is missing" in refused.value.why


def test_all_images_of_another_directory_count_even_a_single_one_of_a_class():
    write_photos("photos", dict.fromkeys(COLORS, 10))
    write_photos("others", {"apple": 7, "berry": 1, "cress": 4}, seed=1)
    run = trained(*TINY_CPU, *IMAGES, "steps=8")
    evaluation = evaluate_checkpoint(run.checkpoint("last"), ["data.root=others"])
    assert evaluation.metrics == pytest.approx(wanted_of_images(run, *sorted(Path("others").glob("*/*"))), rel=1e-5)
    assert evaluation.description["data"].startswith("ImageFolder others, 12 samples (--split all)")
    write_photos("single", dict.fromkeys(COLORS, 1))
    with pytest.raises(ConfigError, match="there are no samples in it"):
        run.evaluate("last", ["data.root=single"], "val")

    write_photos("more", {"cress": 7}, seed=1)  # only some classes of the model
    found = run.evaluate("last", ["data.root=more"])
    assert found == pytest.approx(wanted_of_images(run, *sorted(Path("more/cress").iterdir())), rel=1e-5)

    wanted = {tag: value for tag, value in run.result["metrics"].items() if tag.startswith("eval/")}
    Path("photos").rename("moved")
    for split in (None, "val"):
        assert run.evaluate("last", ["data.root=moved"], split) == wanted, "the same held-out samples"
    Path("moved").rename("photos")
    Path("photos/apple/99.png").write_bytes(Path("photos/apple/00.png").read_bytes())
    description = evaluate_checkpoint(run.checkpoint("last"), ["data.prefetch=1"]).description
    assert "--split val" in description["data"], "other options than the place of the data choose no other samples"


def test_a_split_is_chosen_by_name():
    for seed, (split, count) in enumerate({"train": 10, "val": 3, "test": 5}.items()):
        write_photos(f"photos/{split}", dict.fromkeys(COLORS, count), seed)
    run = trained(*TINY_CPU, *IMAGES, "steps=8")
    for split, folder in {"train": "train", None: "val", "test": "test", "all": "*"}.items():
        wanted = wanted_of_images(run, *sorted(Path("photos").glob(f"{folder}/*/*")))
        assert run.evaluate("last", split=split) == pytest.approx(wanted, rel=1e-5), split
    of_val = run.evaluate("last", split="val")
    Path("photos/train").rename("train")
    assert run.evaluate("last", ["data.root=photos"]) == of_val, "as there is a val/"


def test_all_of_a_data_set_in_memory_is_its_two_parts():
    run = trained(*TINY_CPU, "steps=5")
    parts = [run.evaluate("last", split=split)["eval/accuracy"] for split in ("train", "val", "all")]
    assert parts[2] == pytest.approx((parts[0] * 1438 + parts[1] * 359) / 1797)
    with pytest.raises(ConfigError) as refused:
        run.evaluate("last", split="test")
    assert (refused.value.key, refused.value.got) == ("--split", "test")
    assert "val, train, all" in refused.value.remedy


def test_images_that_would_be_normalized_in_another_way_are_refused():
    write_photos("photos", dict.fromkeys(COLORS, 4))
    run = trained(*TINY_CPU, *IMAGES, "data.mean=[0.5,0.5,0.5]", "steps=1")
    with pytest.raises(ConfigError) as refused:
        run.evaluate("last", ["data=imagefolder", *IMAGES[1:-1]])
    assert (refused.value.key, refused.value.remedy) == ("data.mean", "'data.mean=[0.5,0.5,0.5]'")
