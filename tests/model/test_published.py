"""Initial weights by name, from a loopback server in place of those of torchvision and timm, and from runs."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torchvision
from helpers.compose import TINY_CPU, build_composed_run, compose_config
from safetensors.torch import load_file, save_file

import runner
from runner.config.errors import ConfigError
from runner.model.weights import published

RESNET = ("model=resnet18", "data=synthetic", "data.num_classes=7", "data.size=32")


class Served:
    """A server on the loopback interface, of files below `root`; `paths` are those asked for."""

    def __init__(self, root: Path):
        self.root, self.paths = root, []
        root.mkdir()
        served = self

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *arguments: object) -> None:
                served.paths.append(self.path)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def served(tmp_path, monkeypatch) -> Iterator[Served]:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.chdir(tmp_path)
    served = Served(tmp_path / "served")
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    yield served
    served.server.shutdown()
    served.server.server_close()


def built(*overrides: str) -> dict[str, torch.Tensor]:
    workload = build_composed_run(*overrides).workload
    workload.prepare()
    return workload.build_model().state_dict()


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        built(*overrides)
    return refused.value


def test_weights_are_downloaded_only_if_asked_for_and_only_once(served):
    wanted = built(*TINY_CPU, "seed=1")
    torch.save(wanted, served.root / "weights")
    content = (served.root / "weights").read_bytes()
    name = f"mine-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    for path in (name, "mine-01234567.pth"):
        (served.root / path).write_bytes(content)
    words = (*TINY_CPU, f"model.weights={served.url}/{name}")
    unasked = refusal(*words)
    assert (unasked.key, unasked.remedy) == ("model.weights", f"model.download=true downloads {served.url}/{name}")
    assert served.paths == []
    for allowed in ("model.download=true", "model.download=true", "model.download=false"):
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in built(*words, allowed).items())
    assert served.paths == [f"/{name}"], "then it is in torch's cache"
    assert [path.name for path in Path("torch/hub/checkpoints").iterdir() if path.name[0] != "."] == [name]
    for wrong in ("mine-01234567.pth", "absent.pth"):  # another hash than its name says, and none at all
        refused = refusal(*TINY_CPU, f"model.weights={served.url}/{wrong}", "model.download=true")
        assert refused.key == "model.weights"
        assert not Path("torch/hub/checkpoints", wrong).exists()
    (served.root / "code.pth").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    assert refusal(*TINY_CPU, f"model.weights={served.url}/code.pth", "model.download=true").key == "model.weights"
    assert not Path("ran").exists()


def test_names_of_torchvision_and_timm_are_those_of_their_files(served):
    torch.manual_seed(1)
    network = torchvision.models.resnet18(num_classes=5)
    (cache := Path("torch/hub/checkpoints")).mkdir(parents=True)
    torch.save(network.state_dict(), cache / "resnet18-f37072fd.pth")
    assert published("ResNet50_Weights.IMAGENET1K_V1")[1].name == "resnet50-0676ba61.pth"
    assert published("resnet50")[1].name == published("ResNet50_Weights.DEFAULT")[1].name == "resnet50-11ad3fa6.pth"
    for name in ("resnet18", "ResNet18_Weights.DEFAULT", "ResNet18_Weights.IMAGENET1K_V1"):
        found = built(*RESNET, f"model.weights={name}", "model.reset_head=true")
        assert torch.equal(found["layer4.1.conv2.weight"], network.state_dict()["layer4.1.conv2.weight"])
        assert found["fc.weight"].shape[0] == 7
    assert "reset_head=true" in refusal(*RESNET, "model.weights=resnet18").remedy
    path = served.root / "timm/resnet18.a1_in1k/resolve/main/model.safetensors"
    path.parent.mkdir(parents=True)
    save_file(network.state_dict(), path)
    words = ("model.weights=timm/resnet18.a1_in1k", "model.download=true", "model.reset_head=true")
    assert torch.equal(built(*RESNET, *words)["conv1.weight"], network.conv1.weight)
    assert served.paths == ["/timm/resnet18.a1_in1k/resolve/main/model.safetensors"]


def test_what_names_no_weights_is_refused(served):
    for words, key, said in (
        (("model.weights=resnet19",), "model.weights", "resnet18"),
        (("model.weights=resnet50",), "model.weights", "model.download=true"),
        (("model.weights=resnet18.pht",), "model.weights", "resnet18"),
        (("model.weights=nowhere/w.pth",), "model.weights", "path"),
        (("'model.weights=pytorch/vision:resnet18'",), "model.weights", "address"),
        (("model.download=true",), "model.download", "model.weights"),
        (("model.weights=served",), "model.weights", "run directory"),
    ):
        refused = refusal(*TINY_CPU, *(word.strip("'") for word in words))
        assert (refused.key, said in refused.remedy) == (key, True), words
    assert served.paths == []


def test_weights_of_a_run_are_its_best_or_its_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("steps=6", "save_every=2", "eval_every=2", "keep=10", "optimizer.lr=0.5", "ema.decay=0.5")
    result = runner.train([*TINY_CPU, *words])
    assert result.directory is not None
    best, steps = result.best["step"], result.directory / "checkpoints"
    cases = {result.directory: f"step_{best:08d}", steps / "step_00000002": "step_00000002"}
    for source, step in cases.items():
        wanted = load_file(steps / step / "ema.safetensors")
        found = built(*TINY_CPU, f"model.weights={source}")
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    early = runner.train([*TINY_CPU, "stop.max_time=1e-9", "eval_every=0", f"model.weights={result.directory}"])
    assert (early.status, early.best) == ("stopped", {})
    [last] = (early.directory / "checkpoints").iterdir() if early.directory else []
    found = built(*TINY_CPU, f"model.weights={early.directory}")
    assert all(torch.equal(found[name], tensor) for name, tensor in load_file(last / "model.safetensors").items())

    for file in (steps / f"step_{best:08d}").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert refusal(*TINY_CPU, f"model.weights={steps}/step_{best:08d}").key == "model.weights"


def test_a_saved_config_starts_no_download(tmp_path, served):
    save_file(built(*TINY_CPU), served.root / "tiny.safetensors")
    words = (f"model.weights={served.url}/tiny.safetensors", "model.download=true")
    result = runner.train([*TINY_CPU, *words, "steps=2"])
    assert compose_config(*TINY_CPU, *words)["model"]["download"] is True
    assert runner.compose([f"resume={result.directory}"])["model"]["download"] is False
    assert runner.compose([f"resume={result.directory}", "model.download=true"])["model"]["download"] is True
    [cached] = Path("torch/hub/checkpoints").glob("*.safetensors")
    cached.unlink()
    assert result.directory is not None
    assert runner.load(result.directory).evaluate("last") == result.evaluation, "which needs no initial weights"
    assert runner.load(result.directory).model().training is False
