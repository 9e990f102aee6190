"""Command-line tools: `python -m runner.tools.NAME`.

torch is loaded when it is used, so most of the tools show `--help` at once.
"""

import sys

from runner.system.lazy_import import import_lazily

if sys.argv[:1] == ["-m"]:  # Python's while it imports the package of a module that it will run
    import_lazily("torch", "torchvision")
