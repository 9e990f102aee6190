"""Composes the config of a sweep's first job when this module is imported.

The fork server imports this module before it forks the jobs of the sweep. Each job inherits the cache of
`runner.cli.config_loader`. If a job chooses the same options as the first job, such as `optimizer=adam`, and differs
from it only in single values, such as `optimizer.lr=0.1`, the job takes the composed options from the cache. This saves
the tenth of a second that Hydra takes to compose the options.
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
