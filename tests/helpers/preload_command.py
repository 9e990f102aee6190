"""Import the modules that a command imports before it builds a run; this does not import torch."""

# isort: off
import runner.commands.train  # first: it defers the import of torch

# isort: on
import runner.cli.plan_jobs
import runner.cli.run_sweep
import runner.cli.zipped
import runner.storage.saved_config
import runner.sweep.engines.local  # noqa: F401
from runner.config.composition import Composer

Composer().run([])  # Hydra finds its plugins
