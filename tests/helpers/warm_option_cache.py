"""Import the modules that a command imports before it builds a run, and compose the options that most tests use.

Composing options takes Hydra a long time. If a server imports this module, the commands of the server find the composed
options in the cache. This module does not import torch.
"""

# isort: off
import runner.commands.train  # first: it defers the import of torch

# isort: on
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
