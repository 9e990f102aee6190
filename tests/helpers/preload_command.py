"""Import the modules that a command imports before it builds a run; this does not import torch."""

# ruff: noqa: F401
# isort: off
import runner.commands.train  # first: it defers the import of torch

# isort: on
import runner.storage.saved_run
import runner.sweeps.engines.local
import runner.sweeps.run_sweep
from runner.config.composition import Composer

Composer().run([])  # Hydra finds its plugins
