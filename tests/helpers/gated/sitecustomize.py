"""Run by each interpreter with this directory on PYTHONPATH: installs `step_gate` in commands and fork servers."""

import sys

if sys.orig_argv[1:3] == ["-m", "runner"] or "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    import helpers.step_gate  # noqa: F401
