"""Import what a command imports before it builds a run, without torch, and compose the options of most tests.

Hydra takes long to compose options. The commands of a server that has imported this module find them cached.
"""

import runner.cli.main  # first: it defers the import of torch
import runner.cli.plan_jobs
import runner.cli.run_sweep
import runner.cli.zipped
import runner.storage.saved_config
import runner.sweep.engines.local  # noqa: F401
from runner.cli.composition import Composer

TINY = ["model=tiny", "device=cpu"]
"""The overrides in `helpers.compose.TINY_CPU` that choose an option file."""

for chosen in ([], TINY):
    Composer().run(chosen)
    Composer().sweep(chosen)
