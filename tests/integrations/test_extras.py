"""Networks of timm, environments of Box2D, and ONNX Runtime: `make test-integrations` installs them."""

import json

import pytest
import torch
from helpers.compose import TINY_CPU
from helpers.extras import require

import runner
from runner.commands import convert

pytestmark = pytest.mark.usefixtures("elsewhere")


def trained(*overrides: str) -> runner.SavedRun:
    result = runner.train([*overrides, "device=cpu", "device.threads=1"])
    assert result.status == "done"
    return runner.load(result.directory)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_a_network_of_timm_is_trained_and_its_weights_fit_timm(name):
    timm = require("timm")
    size = 224 if name.startswith("vit") else 32
    small = ("data=synthetic", f"data.size={size}", "data.num_samples=8", "data.holdout=4", "data.num_classes=3")
    run = trained("model=timm", f"model.name={name}", *small, "batch_size=4", "steps=2")
    network = run.model("last").eval()
    plain = timm.create_model(name, num_classes=3).eval()
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, size, size)
    assert not torch.equal(network(inputs), plain(inputs))
    plain.load_state_dict(network.state_dict())
    torch.testing.assert_close(network(inputs), plain(inputs))


def test_an_agent_acts_in_lunar_lander():
    require("Box2D")
    short = ("workload.env_steps=400", "workload.warm_up=200", "workload.eval_episodes=2")
    run = trained("workload=dqn", "env=lunarlander", *short)
    assert run.model("last")(torch.zeros(1, 8)).shape == (1, 4)
    assert -2000 < run.result["metrics"]["eval/return"] < 300


def test_onnx_runtime_computes_what_the_model_computes():
    onnx, _, runtime = require("onnx"), require("onnxscript"), require("onnxruntime")
    run = trained(*TINY_CPU, "steps=4")
    assert convert.main([str(run.directory), "model.onnx"]) == 0
    metadata = {each.key: each.value for each in onnx.load("model.onnx").metadata_props}
    assert json.loads(metadata["model.json"])["classes"] == run.classes
    session = runtime.InferenceSession("model.onnx")
    for count in (1, 5):
        inputs = torch.randn(count, 1, 8, 8)
        [outputs] = session.run(None, {"inputs": inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(outputs), run.model("last")(inputs).detach(), rtol=0, atol=1e-5)
