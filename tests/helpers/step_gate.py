"""A gate before a training step, where runs wait so that a test can rely on them to be still training.

Importing this module installs the gate in this process and its forks, and `command.STEP_GATE_PYTHONPATH` on PYTHONPATH
in new interpreters. With `STEP_GATE=30:FILE`, a run waits before step 30 until FILE exists or the run is asked to stop.

From step 14 on, rank N hangs before a step if there is a file `rank_N_hangs` in the working directory of the rank, to
which it writes when it does.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import runner.training

_train_step = runner.training.train_step


def _gated(state: Any, batches: Any, step: Any, log_due: bool) -> Any:
    hangs = Path(f"rank_{state.session.rank}_hangs")
    if step.number >= 14 and hangs.exists():
        hangs.write_text("now")
        time.sleep(3600)
    number, _, file = os.environ.get("STEP_GATE", "").partition(":")
    if number and step.number == int(number):
        request = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)  # none in a rank, which its parent stops
        while not getattr(request, "received", 0) and not Path(file).exists():
            time.sleep(0.005)
    return _train_step(state, batches, step, log_due)


runner.training.train_step = _gated
