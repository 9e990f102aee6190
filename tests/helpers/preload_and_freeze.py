"""Load what each run would otherwise load itself, and call `gc.freeze`."""

import gc

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import psutil  # noqa: F401
import torch.utils.serialization.config
import torch.utils.tensorboard.summary  # noqa: F401

import helpers.preload_command  # noqa: F401
import runner.api.run_job
import runner.tracking.event_file
import runner.tracking.image_grids  # noqa: F401
from helpers.compose import TINY_CPU, build_composed_run
from runner.config.composition import Composer
from runner.config.options import option_contents, option_files
from runner.data.built_in import read_table

# Fill the caches of the data and of the option checks. No operation of torch may run here: the children of a process
# that has used OpenMP threads hang.
read_table()
for mode in ("single", "ddp"):
    build_composed_run(*TINY_CPU, f"parallel={mode}")
Composer().run(TINY_CPU)
for group in option_files():
    option_contents(group)
PIL.Image.preinit()
gc.collect()
gc.freeze()
