"""Imported last in a server that then forks: what each run would import and read itself; none of it is garbage.

A run imports TensorBoard when it opens its first file. It also collects garbage before its first step, and would look
for it among a million objects of torch, whose memory a child of a server would have to copy.
"""

import gc

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import psutil  # noqa: F401

import helpers.composed  # noqa: F401
import runner.cli.run_job
import runner.tracking.event_file
import runner.tracking.image_grids  # noqa: F401
from helpers.compose import FAST, built
from runner.data.digits import read_table

# What is read is kept, and how options are checked. No operation of torch may run here: children of a process that has
# used OpenMP threads hang.
read_table()
for mode in ("single", "ddp"):
    built(*FAST, f"parallel={mode}")
PIL.Image.preinit()
gc.collect()
gc.freeze()
