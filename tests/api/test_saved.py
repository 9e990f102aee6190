"""Tests of `runner.load`: the model, the metrics and the evaluation of a saved run equal those of the run bitwise."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_edits import rewrite_manifest
from helpers.compose import TINY_CPU, build_composed_run, prepared_workload
from helpers.events import scalar_curves
from helpers.permissions import enforced_permissions
from helpers.runs import write_images
from PIL import Image
from safetensors.torch import load_file

import runner
from runner.api.saved import image_files
from runner.storage.saved_run import config_text

pytestmark = pytest.mark.usefixtures("elsewhere")
IMAGES = ("data=imagefolder", "data.size=8", "data.center=0.75", "data.workers=0", "batch_size=8")
SHORT = ("steps=12", "eval_every=4", "save_every=4", "keep=9", "optimizer.lr=0.2", "log_every=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> runner.SavedRun:
    """A run that tests only read."""
    return trained("seed=5", f"output_root={tmp_path_factory.mktemp('run')}")


@pytest.fixture
def copy(run: runner.SavedRun, tmp_path) -> runner.SavedRun:
    """A copy of the run, which tests may change."""
    return runner.load(shutil.copytree(run.directory, tmp_path / "copy"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> runner.SavedRun:
    """A run on images of two classes that tests only read. The file of its initial weights is gone."""
    root = tmp_path_factory.mktemp("photos")
    write_images(root / "photos")
    network = build_composed_run(*TINY_CPU).workload.model.network((3, 8, 8), 2)
    torch.save(network.state_dict(), root / "initial.pt")
    words = (f"data.root={root / 'photos'}", f"model.weights={root / 'initial.pt'}", f"output_root={root}")
    run = trained(*IMAGES, *words)
    (root / "initial.pt").unlink()
    return run


def trained(*overrides: str) -> runner.SavedRun:
    return runner.load(runner.train([*TINY_CPU, *SHORT, *overrides]).directory)


def test_a_saved_run_has_its_config_its_result_and_its_checkpoints(run):
    typed = (*TINY_CPU, *SHORT, "seed=5", f"output_root={run.directory.parent.parent}")
    assert dict(run.config) == dict(runner.compose(typed))
    assert run.config.overrides[:-1] == typed[:-1]
    assert run.result == json.loads((run.directory / "result.json").read_text())
    assert run.steps == [4, 8, 12]
    assert run.checkpoint("last").name == run.checkpoint(12).name == "step_00000012"
    assert run.checkpoint("best").name == f"step_{run.result['best']['step']:08d}"
    curves = {tag: list(values.items()) for tag, values in run.curves().items()}
    assert curves == scalar_curves(run.directory)
    assert [step for step, _ in curves["train/loss"]] == [4, 8, 12]


def test_the_model_has_the_weights_of_the_checkpoint_and_reads_images_in_gray(run):
    state = torch.get_rng_state()
    model = run.model(8)
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    wanted = load_file(run.checkpoint(8) / "model.safetensors")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    pixels = torch.arange(64, dtype=torch.uint8).view(8, 8) * 4
    Image.fromarray(pixels.numpy()).convert("RGB").save("rgb.png")
    assert torch.equal(run.image_input().read("rgb.png"), pixels[None])


def test_the_model_needs_neither_the_data_nor_the_initial_weights(photos):
    data = Path(photos.config["data"]["root"])
    data.rename(data.with_name("gone"))
    try:
        assert photos.classes == ["cat", "dog"]
        assert photos.model()(torch.zeros(2, 3, 8, 8)).shape == (2, 2)
    finally:
        data.with_name("gone").rename(data)


def test_a_checkpoint_without_a_signature_has_a_model_but_no_classes(copy):
    run = copy
    wanted = run.model("last").state_dict()
    for step in run.steps:
        (run.checkpoint(step) / "model.json").unlink()
        rewrite_manifest(run.checkpoint(step))
    assert run.classes == []
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in run.model("last").state_dict().items())
    with pytest.raises(runner.ConfigError, match="does not say how images are read"):
        run.image_input()


def evaluation(run: runner.SavedRun, step: int) -> dict[str, float]:
    """Return the exact metrics of the evaluation after `step`; those of the log and of TensorBoard are rounded."""
    state = torch.load(run.checkpoint(step) / "state.pt", weights_only=True)
    return {tag: value for tag, value in state["metrics"].items() if tag.startswith("eval/")}


@pytest.mark.parametrize("mode", ["parallel=ddp", "parallel=fsdp", "parallel=ensemble", "precision=bf16 ema.decay=0.9"])
def test_evaluation_of_a_saved_run_is_bitwise_exact(mode):
    run = trained(*mode.split())
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")}
    assert run.evaluate("last") == evaluation(run, 12)
    assert {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")} == before
    if mode == "parallel=ddp":
        assert run.evaluate(4, ["parallel=single"]) == pytest.approx(evaluation(run, 4), rel=1e-6)
    if "ema" in mode:
        wanted = load_file(run.checkpoint("last") / "ema.safetensors")
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in run.model("last").state_dict().items())


def test_an_earlier_checkpoint_is_evaluated_and_on_other_data(run):
    assert run.evaluate(4) == evaluation(run, 4)
    assert run.evaluate(4) != evaluation(run, 8)
    assert run.evaluate(4, ["data.holdout=0.5"])["eval/loss"] != evaluation(run, 4)["eval/loss"]


def test_evaluation_of_a_saved_dqn_run_is_exact():
    options = ["workload=dqn", "workload.env_steps=600", "workload.warm_up=100", "device=cpu", "device.threads=1"]
    result = runner.train([*options, "model.hidden=[8]", "batch_size=16", "workload.eval_episodes=2"])
    assert runner.load(str(result.directory)).evaluate("last") == result.evaluation


@pytest.mark.cases(
    (["resume=auto"], "resume"),
    ("data.size=16", "overrides"),
    (["env=acrobot"], "env"),
    (["data.size=16"], "data.size=16"),
    (["model.hidden=7"], "model.hidden=7"),
)
def test_invalid_evaluations_are_config_errors_that_name_the_key(overrides, key, run):
    with pytest.raises(runner.ConfigError) as error:
        run.evaluate("last", overrides)
    assert error.value.key == key


def test_a_directory_that_is_no_run_is_refused(run, tmp_path):
    for directory, why in ((run.checkpoint("last"), "it is a checkpoint"), (tmp_path, "there is no run")):
        with pytest.raises(runner.ConfigError, match=why) as error:
            runner.load(directory)
        assert error.value.key == "directory"


def test_data_with_other_classes_is_not_evaluated(photos):
    shutil.copytree(photos.config["data"]["root"], "other")
    for split in ("train", "val"):
        Path(f"other/{split}/dog").rename(f"other/{split}/zebra")
    with pytest.raises(runner.ConfigError, match="the model was trained with the classes"):
        photos.evaluate("last", ["data.root=other"])


@pytest.mark.parametrize("file", ["model.safetensors", "model.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_and_last_means_the_previous_one(file, copy):
    path = copy.checkpoint(12) / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    Image.new("L", (8, 8)).save("gray.png")
    uses = [copy.evaluate, copy.model, lambda choice: copy.predict("gray.png", choice)]
    for use in uses if file == "model.safetensors" else [*uses, copy.signature, copy.image_input]:
        with pytest.raises(runner.ConfigError, match="damaged") as error:
            use(12)
        assert error.value.key == "checkpoint"
    assert copy.checkpoint("last").name == "step_00000008"
    assert path.exists(), "another process may be at work there: nothing is renamed"
    assert copy.classes == copy.signature(8)["classes"], "those of the newest intact checkpoint"


def test_predictions_are_those_of_the_evaluation(photos):
    """The probabilities equal those of the network for the inputs of the evaluation, bit for bit."""
    shutil.copytree(photos.config["data"]["root"], "photos")
    workload = prepared_workload(*TINY_CPU, *IMAGES, "data.root=photos")
    [batch] = workload.held_out.in_order(99, (0, 1), torch.device("cpu"))
    with torch.inference_mode():
        wanted, labels = photos.model()(batch.inputs).softmax(1).max(1)
    found = photos.predict(workload.held_out.paths)
    assert [each.file for each in found] == workload.held_out.paths
    assert [each.probability for each in found] == wanted.tolist()
    assert [each.label for each in found] == [photos.classes[label] for label in labels]
    assert photos.predict("photos/val") == photos.predict([Path("photos/val/cat"), "photos/val/dog"])

    Path("photos/val/broken.png").write_text("no image")
    Path("photos/val/notes.txt").write_text("ignored in a directory")
    broken, *others = photos.predict("photos/val")
    assert (broken.file, broken.label, broken.probability) == ("photos/val/broken.png", "", 0.0)
    assert "it is not an image" in broken.error
    assert sorted(others, key=lambda each: each.file) == sorted(found, key=lambda each: each.file)
    assert photos.predict(["photos/val/broken.png"]) == [broken]
    with pytest.raises(runner.ConfigError, match="nothing to predict"):
        photos.predict([])


def test_files_without_permission_are_an_error(tmp_path):
    """Otherwise, images would be missing from the predictions."""
    secret = tmp_path / "images" / "secret"
    secret.mkdir(parents=True)
    (tmp_path / "images" / "image.png").touch()
    for asked in (secret / "image.png", tmp_path / "images"):
        with enforced_permissions(secret, 0), pytest.raises(runner.ConfigError) as error:
            image_files([asked])
        assert error.value.key == "FILES"
        assert "Permission denied" in error.value.why
    assert image_files([tmp_path / "images"]) == [str(tmp_path / "images" / "image.png")]


def change_signature(run: runner.SavedRun, **values: Any) -> None:
    """Change values of the signature of the last checkpoint, and update the checkpoint's manifest."""
    path = run.checkpoint("last")
    signature = json.loads((path / "model.json").read_text()) | values
    (path / "model.json").write_text(json.dumps(signature))
    rewrite_manifest(path)


@pytest.mark.parametrize("values", [{"classes": ["a", "b"]}, {"inputs": [1, 4096, 4096]}, {"inputs": [1, 1, 8, 8]}])
def test_a_signature_of_another_network_is_refused_without_allocating_memory(values, copy):
    change_signature(copy, image=None, **values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(runner.ConfigError) as refusal:
        copy.model("last")
    assert refusal.value.key == "checkpoint"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


def test_a_saved_run_can_be_used_without_its_tracking_backend(run, copy):
    path = copy.directory / "config.yaml"
    tracking = {"_target_": "runner.tracking.remote_backends.MLflow", "uri": "http://localhost:1"}
    path.write_text(config_text(dict(run.config) | {"tracking": tracking}))
    again = runner.load(copy.directory)
    assert again.config["tracking"] == tracking
    assert again.evaluate("last") == run.evaluate("last")
    assert again.model("last") is not None


@pytest.mark.cases(("steps=3", "overrides"), ("workload=nowhere.py", "workload"), ("model", "overrides"))
def test_a_run_is_loaded_with_nothing_but_files_of_code(word, key, run):
    with pytest.raises(runner.ConfigError) as refused:
        runner.load(run.directory, [word])
    assert (refused.value.key, refused.value.got) == (key, word.removeprefix("workload="))
