"""Command-line tools: `python -m runner.tools.NAME`.

torch is loaded when it is used, so most of the tools show `--help` at once.
"""

from runner.system.lazy_import import import_lazily

import_lazily("torch", "torchvision")
