"""`python -m helpers.plot_without_matplotlib ARGUMENT …` runs `runner plot` without matplotlib."""

from __future__ import annotations

import sys

sys.modules["matplotlib"] = None  # type: ignore[assignment]  # importing it fails

from runner.commands.plot import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
