"""Command-line tools: `python -m runner.tools.NAME`. They import torch when they use it: `--help` appears at once."""

from runner.system.lazy_import import import_lazily

import_lazily("torch", "torchvision")
