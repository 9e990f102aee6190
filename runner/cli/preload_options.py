"""Composes the options of the first job when the fork server of a sweep's jobs imports this module.

Composing options takes Hydra a tenth of a second. The jobs that are forked from the server find the config in the cache
of `runner.cli.config_loader`, if they have the same options and differ only in values.
"""

import io
import json
import os
from contextlib import redirect_stderr, suppress

from runner.api.composing import compose
from runner.sweep.engines.local import FIRST_JOB

if FIRST_JOB in os.environ:
    _overrides, _config_dir = json.loads(os.environ[FIRST_JOB])
    with suppress(Exception), redirect_stderr(io.StringIO()):  # the job itself says what is wrong with them
        compose(_overrides, config_dir=_config_dir)
