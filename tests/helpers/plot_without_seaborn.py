"""`python -m helpers.plot_without_seaborn ARGUMENT …` runs `runner plot` without seaborn."""

from __future__ import annotations

import sys

sys.modules["seaborn"] = None  # type: ignore[assignment]  # importing it fails

from runner.commands.plot import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
