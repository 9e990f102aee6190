"""A gate before a training step, at which a run or the jobs of a sweep wait while a test needs them to be training.

Importing this module installs the gate in the training loop of this process and those forked from it; a fresh
interpreter imports it if `command.STEP_GATE_PYTHONPATH` is on PYTHONPATH. `STEP_GATE=30:FILE` in the environment closes
the gate: a run waits before step 30 until FILE exists or the run is asked to stop.

Rank N hangs before step 14 or a later one if there is a file `rank_N_hangs` in its working directory.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import runner.training

_train_step = runner.training.train_step


def _gated(state: Any, batches: Any, step: Any, log_due: bool) -> Any:
    if step.number >= 14 and os.path.exists(f"rank_{state.session.rank}_hangs"):
        time.sleep(3600)
    number, _, file = os.environ.get("STEP_GATE", "").partition(":")
    if number and step.number == int(number):
        request = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)  # none in a rank, which its parent stops
        while not getattr(request, "received", 0) and not Path(file).exists():
            time.sleep(0.005)
    return _train_step(state, batches, step, log_due)


runner.training.train_step = _gated
