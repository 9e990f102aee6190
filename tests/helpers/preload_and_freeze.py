"""Load what each run would otherwise load itself, and call `gc.freeze`."""

import gc
import importlib

import PIL.Image
import PIL.ImageFont

import helpers.preload_command  # noqa: F401
import runner.tracking.image_grids  # noqa: F401
from helpers.compose import TINY_CPU, build_composed_run
from runner.api.composing import JOB_MODULES
from runner.config.composition import Composer
from runner.config.options import option_contents, option_files
from runner.data.built_in import read_table
from runner.system.provenance import versions

# Fill the caches of the data and of the option checks. No operation of torch may run here: the children of a process
# that has used OpenMP threads hang.
LATE = ("runner.models.convnet", "torch.utils.serialization.config", "tensorboard.plugins.hparams.metadata")
for name in (*JOB_MODULES, *LATE):
    importlib.import_module(name)
read_table()
versions()
for mode in ("single", "ddp"):
    build_composed_run(*TINY_CPU, f"parallel={mode}")
Composer().run(TINY_CPU)
for group in option_files():
    option_contents(group)
PIL.Image.preinit()
gc.collect()
gc.freeze()
