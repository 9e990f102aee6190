"""Load what each run would otherwise load itself, and call `gc.freeze`.

A server imports this module before it forks. Each run imports TensorBoard when it opens its first file, and collects
garbage before its first step. Without `gc.freeze`, this garbage collection would visit a million objects of torch, and
a child of the server would have to copy the memory pages of these objects.
"""

import gc

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import psutil  # noqa: F401

import helpers.preload_command  # noqa: F401
import runner.api.run_job
import runner.tracking.event_file
import runner.tracking.image_grids  # noqa: F401
from helpers.compose import TINY_CPU, build_composed_run
from runner.data.digits import read_table

# Fill the caches of the data and of the option checks. No operation of torch may run here: the children of a process
# that has used OpenMP threads hang.
read_table()
for mode in ("single", "ddp"):
    build_composed_run(*TINY_CPU, f"parallel={mode}")
PIL.Image.preinit()
gc.collect()
gc.freeze()
