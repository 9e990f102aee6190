"""Command-line tools: `python -m runner.tools.NAME`, each with `--help`, which needs no torch and so appears at once."""

from runner.system.lazy_import import import_lazily

import_lazily("torch", "torchvision")
