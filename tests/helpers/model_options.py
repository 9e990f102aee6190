"""`python -m helpers.model_options` builds model options, and prints whether this loaded torch."""

from __future__ import annotations

import sys

from runner.system.lazy_import import import_lazily

import_lazily("torch", "torchvision")

from runner.config.errors import ConfigError  # noqa: E402
from runner.config.schema import build  # noqa: E402
from runner.model.base import Model  # noqa: E402


def main() -> None:
    build({"_target_": "runner.model.resnet.ResNet", "depth": 18}, Model, "model")
    try:
        build({"_target_": "runner.model.convnet.ConvNet", "weights": "absent.pt"}, Model, "model")
    except ConfigError:
        print("refused", "torch.nn" in sys.modules, "models.convnet" in sys.modules)


if __name__ == "__main__":
    main()
