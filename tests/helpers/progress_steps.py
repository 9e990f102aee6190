"""`python -m helpers.progress_steps` shows the progress of forty steps of ten milliseconds."""

from __future__ import annotations

import time

from runner.tracking.metrics import Measured
from runner.tracking.progress import progress_for


def main() -> None:
    with progress_for(40, 64, 0, visible=True) as progress:
        progress.metrics({"train/loss": 0.25, "train/accuracy": 0.75})
        for step in range(1, 41):
            time.sleep(0.01)
            progress.step(step, Measured(step, step / 100, step / 100))
    print("after it")


if __name__ == "__main__":
    main()
