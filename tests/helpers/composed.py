"""Imports what commands do until a run is built, without torch, and composes the options of most tests.

Composing takes Hydra most of its time: the commands of a server that has imported this find these options kept.
"""

import runner.cli.main  # first: it defers torch
import runner.cli.plan_jobs
import runner.cli.run_sweep
import runner.cli.zipped
import runner.storage.saved_config
import runner.sweep.engines.local  # noqa: F401
from runner.cli.composition import Composer

TINY = ["model=tiny", "device=cpu"]
"""The options in `helpers.compose.FAST`."""

for chosen in ([], TINY):
    Composer().run(chosen)
    Composer().sweep(chosen)
