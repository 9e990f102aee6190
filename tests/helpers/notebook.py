"""A program without a file, like a notebook: it trains twice in several processes, and prints results as JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys

import runner

WORDS = ["model=tiny", "data.size=8", "device=cpu", "device.threads=1", "steps=4", "parallel=ddp", "tracking=none"]
assert not hasattr(sys.modules["__main__"], "__file__"), "or it would not be like a notebook"


def ignored() -> set[signal.Signals]:
    """Return the signals that this process blocks, and the signals for which it has a handler in Python."""
    handled = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()) | handled


before, variables = ignored(), dict(os.environ)
results = [runner.train([*WORDS, f"seed={seed}"]) for seed in (0, 0)]
child = multiprocessing.get_context("forkserver").Process(target=signal.pause)
child.start()
child.terminate()  # SIGTERM is blocked in children of the runner's fork server
child.join()
told = {
    "losses": [result.metrics["train/loss"] for result in results],
    "processes": [result.world_size for result in results],
    "signals": before == ignored(),
    "variables": variables == dict(os.environ),
    "terminated": child.exitcode == -signal.SIGTERM,
}
print(json.dumps(told))
