"""`python -m helpers.imported_by MODULE …` imports the modules, and prints the names of all loaded modules."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    print(*sorted(sys.modules), sep="\n")
