"""Weights that others publish, by name or address: in torch's cache or, if the user allows it, downloaded to it."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from runner.config.errors import ConfigError, check, did_you_mean

log = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds without an answer; torch sets no limit


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
