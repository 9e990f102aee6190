"""Tests of `runner.model.weights`: initial weights from files, which may come from an untrusted source."""

import os
import zipfile
from copy import deepcopy as copy

import pytest
import torch
from helpers.stateful_objects import evolving
from safetensors.torch import save_file
from torch import nn

from runner.config.errors import ConfigError
from runner.model.weights import load_weights, read_weights
from runner.models.qnet import QNet, WithTarget
from runner.storage.safe_torch_load import load_tensors


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_symlink_to_a_weights_file_is_followed(tmp_path, name):
    """The cache of a model hub consists of symbolic links."""
    tensors, blob = {"w": torch.arange(3.0)}, tmp_path / "blob"
    save_file(tensors, blob) if name.endswith("safetensors") else torch.save(tensors, blob)
    (tmp_path / name).symlink_to(blob)
    assert read_weights(str(tmp_path / name))["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "a link to itself", b"", b"\x80\x02garbage", bytes(200)])
def test_anything_but_a_weights_file_is_refused(tmp_path, name, kind):
    path = tmp_path / name
    if isinstance(kind, bytes):
        path.write_bytes(kind)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "/dev/zero" else name)
    with pytest.raises(ConfigError, match="Error: ") as refused:  # what torch, safetensors or the system says
        read_weights(str(path))
    assert (refused.value.key, refused.value.got) == ("weights", str(path))


def test_a_zip_archive_that_only_torch_recognizes_is_refused(tmp_path):
    """Because of a comment at its end, Python does not find the central directory of the archive, but torch does."""
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(3)}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-2] + (4).to_bytes(2, "little") + b"PK\5\6")
    with pytest.raises(zipfile.BadZipFile):
        load_tensors(path)


def test_the_weights_of_gpt2_are_transposed_for_the_network_of_this_project_alone(tmp_path):
    """A user may have the network of transformers, whose weights are [inputs, outputs], too."""
    theirs: nn.Module = nn.Linear(6, 2, bias=False)  # in place of 2 inputs and 6 outputs
    for name in ("c_attn", "attn", "0", "h"):
        theirs = nn.ModuleDict({name: theirs})
    saved = copy(theirs.state_dict())
    assert [*saved] == ["h.0.attn.c_attn.weight"]
    torch.save(saved, file := tmp_path / "weights.pt")
    nn.init.zeros_(next(theirs.parameters()))
    load_weights(theirs, str(file), False)
    assert torch.equal(theirs.state_dict()["h.0.attn.c_attn.weight"], saved["h.0.attn.c_attn.weight"])


def test_buffers_of_weights_may_have_another_shape_but_no_parameter_may(tmp_path):
    trained, file = evolving(), tmp_path / "weights.pt"
    for _ in range(3):
        trained(torch.ones(2, 5))
    torch.save(trained.state_dict(), file)
    load_weights(new := evolving(), str(file), False)
    assert new[2].grown.tolist() == [1, 1 / 2, pytest.approx(1 / 3)]
    assert new[2].late.tolist() == trained[2].late.tolist()
    torch.save(trained.state_dict() | {"first.bias": torch.zeros(6)}, file)
    with pytest.raises(ConfigError, match=r"1 of a different shape: first.bias \[6\] instead of \[5\]"):
        load_weights(evolving(), str(file), False)


class EndsWithoutParameters(nn.Module):
    """A network whose last block has no parameters."""

    def __init__(self, num_outputs: int):
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, num_outputs)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [
            ("body", self.body),
            ("head", nn.Sequential(self.head, nn.ReLU())),
            ("shape", nn.Sequential(nn.Flatten())),
        ]


def test_the_last_layer_with_parameters_is_the_head(tmp_path):
    saved, model = EndsWithoutParameters(7), EndsWithoutParameters(4)
    head = model.head.weight.detach().clone()
    torch.save(saved.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ConfigError) as refused:
        load_weights(model, str(tmp_path / "weights.pt"), reset_head=False)
    assert "model.reset_head=true" in refused.value.remedy
    load_weights(model, str(tmp_path / "weights.pt"), reset_head=True)
    assert torch.equal(model.body.weight, saved.body.weight)
    assert torch.equal(model.head.weight, head)


class Plain(nn.Module):
    """A network without `blocks`, as one of timm, whose `default_cfg` may name its last layer."""

    def __init__(self, num_outputs: int, **named: str | tuple[str, ...]):
        super().__init__()
        self.head, self.body = nn.ModuleDict({"fc": nn.Linear(3, num_outputs)}), nn.Linear(2, 3)
        self.default_cfg = named


@pytest.mark.parametrize("named", [{}, {"classifier": "head.fc"}, {"classifier": ("head.fc",)}, {"classifier": None}])
def test_the_last_layer_of_a_network_without_blocks_is_what_it_names_or_what_has_other_shapes(tmp_path, named):
    saved, path = Plain(7), str(tmp_path / "weights.pt")
    torch.save(saved.state_dict(), path)
    model = Plain(4, **named)
    head = model.head["fc"].weight.detach().clone()
    with pytest.raises(ConfigError) as refused:
        load_weights(model, path, reset_head=False)
    assert "model.reset_head=true" in refused.value.remedy
    load_weights(model, path, reset_head=True)
    assert model.body.weight.equal(saved.body.weight)
    assert model.head["fc"].weight.equal(head)
    same = Plain(7, **named)
    head = same.head["fc"].weight.detach().clone()
    if named.get("classifier"):
        load_weights(same, path, reset_head=True)
        assert same.head["fc"].weight.equal(head)
    else:
        with pytest.raises(ConfigError, match="last layer is not known"):
            load_weights(same, path, reset_head=True)


class Tied(nn.Module):
    """A network whose head has the weight of its embedding; `classifier` names the head in place of `blocks`."""

    def __init__(self, size: int = 5, classifier: str = ""):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(size, 3), nn.Linear(3, 3), nn.Linear(3, size)
        self.head.weight = self.embedding.weight
        self.default_cfg = {"classifier": classifier}


class TiedBlocks(Tied):
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [("embedding", self.embedding), ("body", self.body), ("head", self.head)]


def same_layer_twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize("make", [TiedBlocks, lambda: Tied(classifier="head"), same_layer_twice])
def test_a_last_layer_that_is_tied_to_another_is_not_reset_in_silence(tmp_path, make):
    saved, model = make(), make()
    torch.save(saved.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="is tied") as refused:
        load_weights(model, str(tmp_path / "weights.pt"), reset_head=True)
    assert refused.value.key == "reset_head"
    load_weights(model, str(tmp_path / "weights.pt"), reset_head=False)
    assert all(value.equal(saved.state_dict()[name]) for name, value in model.state_dict().items())


def test_resetting_a_tied_head_is_not_proposed(tmp_path):
    torch.save(TiedBlocks(7).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="of a different shape") as refused:
        load_weights(TiedBlocks(), str(tmp_path / "weights.pt"), reset_head=False)
    assert "reset_head" not in refused.value.remedy


class Aliased(EndsWithoutParameters):
    """Its layers have two names each, and are not tied."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers = nn.ModuleList([self.body, self.head])


def test_a_head_with_two_names_is_reset(tmp_path):
    saved, model = Aliased(), Aliased()
    torch.save(saved.state_dict(), tmp_path / "weights.pt")
    head = model.head.weight.detach().clone()
    load_weights(model, str(tmp_path / "weights.pt"), reset_head=True)
    assert model.body.weight.equal(saved.body.weight)
    assert model.head.weight.equal(head)


@pytest.mark.parametrize("key", ["net", "model_state", "weights", "state_dict"])
def test_the_state_dict_in_a_checkpoint_is_found_under_any_key(tmp_path, key):
    net, path = nn.Linear(2, 3), str(tmp_path / "weights.pth")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.save({"epoch": 3, key: net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert read_weights(path)["weight"].equal(net.weight)
    torch.save({"generator": net.state_dict(), "discriminator": net.state_dict()}, path)
    with pytest.raises(ConfigError, match="generator, discriminator"):
        read_weights(path)


def test_of_a_module_that_holds_network_and_loss_the_network_is_loaded_and_the_rest_is_said(tmp_path, caplog):
    path, model = str(tmp_path / "last.ckpt"), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    saved = nn.ModuleDict({"criterion": nn.CrossEntropyLoss(torch.ones(2)), "net": nn.Sequential(*map(copy, model))})
    for parameter in saved.parameters():
        parameter.data += 1
    torch.save({"epoch": 1, "state_dict": saved.state_dict(), "loops": {}}, path)
    caplog.set_level("INFO")
    load_weights(model, path, reset_head=False)
    assert all(tensor.equal(saved["net"].state_dict()[name]) for name, tensor in model.state_dict().items())
    assert "criterion" in caplog.text
    torch.save(nn.ModuleDict({"student": model, "teacher": model}).state_dict(), path)
    with pytest.raises(ConfigError, match="several networks: student, teacher"):
        load_weights(model, path, reset_head=False)


@pytest.mark.parametrize("normalized", [False, True])
def test_the_online_network_of_an_agent_is_loaded(tmp_path, normalized):
    agent = WithTarget(QNet(4, 2, [8]), *((torch.ones(4), torch.ones(4)) if normalized else ()))
    agent.online.load_state_dict({name: tensor + 1 for name, tensor in agent.online.state_dict().items()})
    save_file(agent.state_dict(), tmp_path / "agent.safetensors")
    model = QNet(4, 2, [8])
    load_weights(model, str(tmp_path / "agent.safetensors"), reset_head=False)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in agent.online.state_dict().items())
