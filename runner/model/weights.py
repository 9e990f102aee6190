"""Load initial weights from a file, a run or published ones, without executing code in them.

Published weights are in torch's cache or, if the user allows it, downloaded to it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from runner.config.errors import ConfigError, check, did_you_mean
from runner.models.blocks import blocks_of
from runner.storage import state_dict
from runner.storage.checkpoint import DamagedError, chosen_checkpoint, load
from runner.storage.files import open_regular
from runner.storage.safe_torch_load import load_tensors
from runner.storage.state_dict import renamed, with_versions

log = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds without an answer; torch sets no limit

SAVE_WEIGHTS = "save only the weights: torch.save(model.state_dict(), 'weights.pt')"


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.safetensors` or `torch.save` file by name, on the CPU.

    The latter has a `state_dict`, or a dictionary with one: under the key `state_dict`, `model_state_dict` or `model`,
    or under any other if it is the only one. What wrappers add to the names is removed: `module.` before all of them,
    and `_orig_mod` anywhere.
    """
    content = _load(path)
    if isinstance(content, Mapping) and not _is_state_dict(content):
        found = [key for key, value in content.items() if _is_state_dict(value)]
        usual = [key for key in ("state_dict", "model_state_dict", "model") if key in found]
        why = f"it contains several state dicts: {', '.join(map(str, found))}"
        check(bool(usual) or len(found) < 2, "weights", path, why, "save one of them by itself: torch.save")
        content = content[(usual or found)[0]] if found else content
    check(_is_state_dict(content), "weights", path, "it does not contain a state_dict", SAVE_WEIGHTS)
    tensors = with_versions({name: each for name, each in content.items() if name != "n_averaged"}, content)
    tensors = renamed(tensors, lambda name: name.replace("_orig_mod.", ""))
    while tensors and all(name.startswith("module.") for name in tensors):
        tensors = renamed(tensors, lambda name: name.removeprefix("module."))
    return tensors


def _is_state_dict(value: Any) -> bool:
    is_named = isinstance(value, Mapping) and all(isinstance(each, str) for each in value)
    return is_named and bool(value) and all(isinstance(each, torch.Tensor) for each in value.values())


def weights_of(source: str) -> dict[str, torch.Tensor]:
    """Return the tensors of `source` by name, on the CPU: a file, a run, a checkpoint, or published weights.

    Of a run, they are those of the best checkpoint, or of the last one if it has not been evaluated; the averaged ones,
    if it averages them. Published weights are downloaded if they are missing.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        return read_weights(source if path.is_file() else str(fetched(source)))
    try:
        checkpoint = path
        if path.parent.name != "checkpoints":
            try:
                checkpoint = chosen_checkpoint(path, "best")
            except ConfigError:
                checkpoint = chosen_checkpoint(path, "last")
        content = load(checkpoint)
    except (DamagedError, OSError, ConfigError) as error:
        why = error.why if isinstance(error, ConfigError) else error
        remedy = "name a run directory, a checkpoint in one, or a file"
        raise ConfigError("weights", source, f"no checkpoint can be read ({why})", remedy) from None
    log.info("weights: those of %s", checkpoint)
    return content.ema or content.tensors


def published(name: str) -> tuple[str, Path]:
    """Return the address of the weights `name`, and their path in torch's cache, whether they are there or not.

    `name` is an address, `timm/NAME`, or a name of torchvision: of a network, such as `resnet18`, for its default
    weights, or of weights, such as `ResNet18_Weights.IMAGENET1K_V1`. Raises `ConfigError` if there are none.
    """
    from torchvision import models

    cache, url = Path(torch.hub.get_dir()) / "checkpoints", name
    if re.fullmatch(r"timm/[\w.-]+", name):
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        return f"{hub}/{name}/resolve/main/model.safetensors", cache / f"{name.replace('/', '_')}.safetensors"
    if not re.match(r"https?://", name):
        why = "torch.hub would run the code of this repository"
        check(":" not in name, "weights", name, why, "the address of a file of weights: model.weights=https://…")
        try:
            network: Any = None if "_Weights." in name else models.get_model_weights(name)
            url = network.DEFAULT.url if network else models.get_weight(name).url
        except (ValueError, KeyError, AttributeError):
            why = f"there is no such file in {Path(name).parent.absolute()}, nor are there weights of this name;"
            near = did_you_mean(name, models.list_models(module=models))
            remedy = "give the path of a file or a run, a name of torchvision such as resnet50, timm/NAME, or null"
            raise ConfigError("weights", name, why, near if near.startswith("did") else remedy) from None
    return url, cache / (Path(urlparse(url).path).name or "weights")


def check_available(source: str, download: bool) -> None:
    """Refuse `source` if it is neither a path nor the name of weights in torch's cache or, if `download`, elsewhere."""
    if not (path := Path(source).expanduser()).is_file() and not path.is_dir():
        url, file = published(source)
        why = f"it is not in torch's cache, as {file}, and nothing is downloaded unasked"
        check(download or file.is_file(), "weights", source, why, f"model.download=true downloads {url}")


def fetched(name: str) -> Path:
    """Return the path of the published weights `name` in torch's cache, to which they are downloaded if missing."""
    url, file = published(name)
    timeout = socket.getdefaulttimeout()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_name(f".{file.name}.lock").open("a") as lock:  # one process of this machine downloads
            fcntl.flock(lock, fcntl.LOCK_EX)
            if file.is_file():
                log.info("weights: %s is in torch's cache, as %s", name, file)
                return file
            log.info("weights: downloading %s to %s", url, file)
            socket.setdefaulttimeout(_PATIENCE)
            digest = re.search(r"-([a-f0-9]{8,})\.", file.name)  # as torch.hub names files
            torch.hub.download_url_to_file(url, str(file), digest[1] if digest else None, progress=False)
    except (OSError, RuntimeError, ValueError) as error:
        why = f"{url} cannot be downloaded ({' '.join(str(error).split()) or type(error).__name__})"
        raise ConfigError("weights", name, why, "try again, or download it and give the path of the file") from None
    finally:
        socket.setdefaulttimeout(timeout)
    return file


def _load(path: str) -> Any:
    file = Path(path).expanduser()
    try:
        file = file.resolve(strict=True)  # the path may be a link, as in the cache of a model hub
        if Path(path).suffix != ".safetensors":
            return load_tensors(file)
        open_regular(file).close()  # the next line would wait for the writer of a pipe
        return state_dict.read(file)
    except Exception as error:  # a damaged file raises anything from EOFError to UnicodeDecodeError
        # Only the first sentence: the next ones of torch explain how to execute the code in the file.
        sentence = re.split(r"[.] |\n", str(error))[0]
        if refused := re.search(r"GLOBAL (\S+) was not an allowed global", str(error)):
            sentence = f"it contains {refused[1]}, and a class may run code"
        why = f"it cannot be loaded: {type(error).__name__}: {sentence}"
        raise ConfigError("weights", path, why, SAVE_WEIGHTS) from None


def load_weights(model: torch.nn.Module, source: str, reset_head: bool) -> None:
    """Replace the weights of `model` by those of `source` (see `weights_of`).

    From the weights of an agent, only its online network is loaded. If the network is an attribute of what was saved,
    such as `model.`, other attributes, as a loss, are left out. If `reset_head`, the last layer keeps its parameters.
    """
    from runner.models.gpt import GPT, linear_layout
    from runner.models.qnet import online_tensors

    own, tensors = model.state_dict(), online_tensors(weights_of(source))
    if isinstance(model, GPT):
        tensors = linear_layout(tensors)
    if not own.keys() & tensors.keys():  # of a LightningModule that holds the network
        attributes = list(dict.fromkeys(name.partition(".")[0] for name in tensors))
        fitting = [each for each in attributes if any(f"{each}.{name}" in tensors for name in own)]
        why = f"it contains several networks: {', '.join(fitting)}"
        check(len(fitting) < 2, "weights", source, why, "save the state_dict of one of them")
        if fitting or len(attributes) == 1:
            prefix = f"{(fitting or attributes)[0]}."
            others = ", ".join(each for each in attributes if each not in fitting)
            ours = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            tensors = renamed(with_versions(ours, tensors), lambda name: name.removeprefix(prefix))
            if fitting and others:
                log.info("weights: left out what is not the network in %s: %s", source, others)
    reshaped = {name: each for name, each in tensors.items() if name not in own or each.shape != own[name].shape}
    state_dict.fit_buffers(model, reshaped, tensors)
    own, (head, tied) = model.state_dict(), _head(model, tensors)
    if reset_head:
        why = "the network has no blocks(), and not just one layer has other shapes in it: its last layer is not known"
        check(bool(head), "reset_head", True, why, "set model.reset_head=false")
        why = f"a parameter of the last layer ({tied}) is tied: another layer, whose weights are loaded, has it, too"
        check(not tied, "reset_head", True, why, "set model.reset_head=false")
        tensors |= {name: own[name] for name in head}
    # Files from old versions of PyTorch lack num_batches_tracked: load_state_dict then keeps the model's.
    loaded = {p for name, p in model.named_parameters(remove_duplicate=False) if name in tensors}
    others = {name for name, p in model.named_parameters(remove_duplicate=False) if p in loaded}
    optional = others | {name for name in own if name.endswith("num_batches_tracked")}
    missing = [name for name in own if name not in tensors and name not in optional]
    unexpected = [name for name in tensors if name not in own and not name.startswith(_AUXILIARY)]
    reshaped = [name for name, tensor in tensors.items() if name in own and tensor.shape != own[name].shape]
    state = with_versions(tensors, tensors, own)
    if missing or unexpected or reshaped:
        with suppress(RuntimeError, ValueError):  # a module may change what an older version of it has saved
            model.load_state_dict(state)
            return
        shapes = [f"{name} {list(tensors[name].shape)} instead of {list(own[name].shape)}" for name in reshaped]
        lists = {"missing": missing, "unexpected": unexpected, "of a different shape": shapes}
        why = "; ".join(f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in lists.items() if names)
        remedy = "choose the model and the data that the weights belong to, or weights of this model"
        if not tied and head.issuperset(missing + unexpected + reshaped):
            remedy = "only the last layer differs: model.reset_head=true loads all layers except the last"
        raise ConfigError("weights", source, f"the tensors in it are not those of this network ({why})", remedy)
    model.load_state_dict(state, strict=False)


_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""Prefixes of names that are ignored in a file, because networks are built without auxiliary classifiers."""


def _head(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[set[str], str]:
    """Return the names of the tensors of the last layer, if it is known, and that of one which other layers have, too.

    It is the last block that has parameters; the classifier that a network of timm names; or otherwise the one layer
    whose shapes are not those of `tensors`.
    """
    own, modules, before = model.state_dict(), dict(model.named_modules()), list[torch.nn.Module]()
    if parts := [block for _, block in blocks_of(model)]:
        layers = [torch.nn.Identity()]
        while parts := [part for part in parts if any(True for _ in part.parameters())]:
            *others, layer = parts
            before, layers = [*before, *others], [layer]
            parts = list(layer) if isinstance(layer, torch.nn.Sequential) else []
    else:
        options = getattr(model, "default_cfg", None)
        named = options.get("classifier") or () if isinstance(options, Mapping) else ()
        reshaped = {name.rpartition(".")[0] for name in own.keys() & tensors if tensors[name].shape != own[name].shape}
        known = [named] if isinstance(named, str) else [*named] or [*reshaped][: len(reshaped) == 1]
        layers = [modules[name] for name in known if name and name in modules]
    inside = {each for layer in layers for each in layer.modules()}
    outside = {p for each in {*modules.values()} - inside for p in each.parameters(recurse=False)}
    outside |= {p for each in before for p in each.parameters()}
    head = {
        name: tensor
        for prefix, each in model.named_modules(remove_duplicate=False)
        if each in inside
        for name, tensor in [*each.named_parameters(prefix, False), *each.named_buffers(prefix, False)]
        if name in own
    }
    return {*head}, next((name for name, tensor in head.items() if tensor in outside), "")
