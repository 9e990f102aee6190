"""The command, `python -m runner` or `runner`. It installs the handlers of stop signals before slow imports.

It also removes the working directory from the import path. `python -m` puts the working directory first, so that a
logging.py or secrets.py in it would shadow other modules.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
try:
    _HERE = os.getcwd()
except OSError as error:  # it has been deleted
    why = f"current directory: it cannot be read ({error.strerror})"
    print(f"{why}\n  change to one that exists: cd DIR", file=sys.stderr)
    raise SystemExit(2) from None
if sys.path and sys.path[0] != _ROOT and os.path.realpath(sys.path[0]) == os.path.realpath(_HERE):
    del sys.path[0]

_PACKAGES = ("torch", "torchvision", "hydra", "omegaconf", "gymnasium", "psutil", "rich", "cloudpickle")
if missing := [name for name in _PACKAGES if find_spec(name) is None]:
    why = f"{sys.executable} has no {', '.join(missing)}"
    print(f"{why}\n  install runner with its packages: {sys.executable} -m pip install -e {_ROOT}", file=sys.stderr)
    raise SystemExit(2)

if "OMP_WAIT_POLICY" not in os.environ:
    # Threads that wait for others keep their cores for milliseconds by default, even if those need them to go on. A
    # tenth of a millisecond is as fast, and many times as fast on a machine that others keep busy.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

os.environ.setdefault("PYTHONSAFEPATH", "1")  # for the processes that multiprocessing starts by `python -c`

import importlib  # noqa: E402

from runner.commands import COMMANDS  # noqa: E402
from runner.system.console import open_console, output_code  # noqa: E402
from runner.system.lazy_import import import_lazily  # noqa: E402
from runner.system.signals import run_main  # noqa: E402


def main() -> int:
    """Run the command, or the subcommand that the first word names, and return its exit code."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        import_lazily("torch", "torchvision")
        open_console()
        return importlib.import_module(f"runner.commands.{sys.argv[1]}").main(sys.argv[2:]) or output_code()

    def command() -> int:
        open_console()
        from runner.commands.train import main  # pyright: ignore

        return main()

    return run_main(command)


if __name__ == "__main__":
    raise SystemExit(main())
