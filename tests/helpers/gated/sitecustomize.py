"""Installs `step_gate` in processes that run `python -m runner` or a fork server."""

import sys

if sys.orig_argv[1:3] == ["-m", "runner"] or "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    import helpers.step_gate  # noqa: F401
