"""Finds out, before the first job of a sweep is started, whether any option that a glob lists fits the data."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runner.config import user_code
from runner.config.composition import Composer
from runner.config.errors import ABSENT, ConfigError
from runner.config.overrides import override_key
from runner.run import build_run
from runner.sweeps.engines.local import Local
from runner.sweeps.sweep_jobs import SweepJobs, shared_overrides
from runner.system.forkserver import run_in_child

_GROUPS = ("model", "data", "env", "workload")
"""The config groups on which depends whether a network fits the data."""


def check_one_fits(jobs: SweepJobs, typed: Sequence[str], config_dir: str | None) -> None:
    """Raise the `ConfigError` of the first job if none of the options that a typed glob lists fits the others.

    The data is loaded in another process, as by a job, until one fits: this takes seconds, which a list of chosen
    options is spared. What a job refuses for another reason, with code of the user's or elsewhere than on this machine
    is left to the jobs.
    """
    if not any("=glob(" in word for word in typed):
        return
    swept, given = {key.partition("@")[0] for key in jobs.swept}, user_code.given()
    groups = swept & {*_GROUPS}
    other_values = {key for key in swept if "." in key and key.partition(".")[0] in _GROUPS}
    if not groups or other_values or given.files or given.objects or not isinstance(jobs.engine, Local):
        return
    rows = list({shared_overrides(words): words for words in reversed([*jobs])}.values())[::-1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "refusals.json"
        run_in_child(_write_refusals, rows, config_dir, sorted(groups), str(out))
        found = json.loads(out.read_text()) if out.exists() else []
    if len(found) == len(rows):
        key, got, why, remedy = found[0]
        raise ConfigError(
            key, ABSENT if got is None else got, f"{why}; none of the {len(rows)} combinations fits", remedy
        )


def _write_refusals(rows: Sequence[list[str]], config_dir: str | None, groups: Sequence[str], out: str) -> None:
    """Write why each of the jobs with the overrides `rows` is refused, up to the first that fits."""
    found: list[tuple[str, str | None, str, str]] = []
    composer = Composer(config_dir)
    for words in rows:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                run = build_run(composer.run(words).config)
                with contextlib.closing(run.workload):
                    run.workload.prepare()
            break
        except ConfigError as error:
            if override_key(error.key).partition(".")[0] not in groups:
                break
            found.append((error.key, error.got if isinstance(error.got, str) else None, error.why, error.remedy))
        except Exception:  # the jobs will say it
            break
    Path(out).write_text(json.dumps(found))
