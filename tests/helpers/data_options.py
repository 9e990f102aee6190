"""`python -m helpers.data_options` builds dataset options, and checks that neither torch nor a data library is loaded.

It reads the config nodes of the options from standard input, as a JSON object by name, and prints the names.
"""

from __future__ import annotations

import json
import sys

from runner.system.lazy_import import import_lazily

import_lazily("torch", "torchvision")

from runner.config.schema import build  # noqa: E402
from runner.data.base import Data  # noqa: E402


def main() -> None:
    for name, node in json.load(sys.stdin).items():
        build(node | ({"root": "anywhere"} if "root" in node else {}), Data, "data")
        loaded = [name for name in ("torch._C", "torchvision.datasets", "numpy", "PIL.Image") if name in sys.modules]
        assert not loaded, (name, loaded)
        print(name)


if __name__ == "__main__":
    main()
