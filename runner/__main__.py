"""The command: compose the config, build one Run, launch it. The only place that knows Hydra's entrypoint."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path and sys.path[0] != str(ROOT) and Path(sys.path[0] or ".").resolve() == Path.cwd():
    del sys.path[0]  # `python -m` puts the caller's directory first: a models.py there would hide ours

from runner.lazy import import_lazily  # noqa: E402

import_lazily("torch", "torchvision")

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from runner import cli, directory  # noqa: E402
from runner.config import CONF, ConfigError  # noqa: E402

DONE, CRASHED, REFUSED, DIVERGED, STOPPED, INTERRUPTED = 0, 1, 2, 3, 75, 130
_CODES = {"done": DONE, "crashed": CRASHED, "diverged": DIVERGED, "stopped": STOPPED}

log = logging.getLogger("runner")


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        print(cli.help_text())
        return DONE
    try:
        codes = launch_hydra(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except (HydraException, OmegaConfBaseException) as error:
        print(cli.explained(error), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # Hydra's own usage errors, and a sweep that was asked to stop
        return stop.code if isinstance(stop.code, int) else REFUSED
    return next((code for code in codes if code != DONE), DONE)


def launch_hydra(arguments: list[str]) -> list[int]:
    """Let Hydra compose the config, and call `job` once, or once a job of a sweep; returns the exit codes."""
    sweep = bool({"-m", "--multirun"} & set(arguments))
    source = cli.override_value(arguments, "resume")
    if source not in (None, "auto", "never") and not sweep:
        from runner.resume import saved_overrides

        arguments = cli.with_saved(saved_overrides(Path(source or "")), arguments)
    sys.argv[1:] = [cli.quoted(argument, sweep) for argument in arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, so that `main` can explain
    started = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"
    OmegaConf.register_new_resolver("started", lambda: started, replace=True)

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def composed(config: DictConfig) -> None:
        try:
            codes.append(job(config))
        except Exception as error:  # past Hydra, which would print it
            errors.append(error)

    codes: list[int] = []
    errors: list[Exception] = []
    composed()
    if errors:
        raise errors[0]
    return codes


def job(config: DictConfig) -> int:
    """One run, alone or as a job of a sweep, where its failure does not end the others."""
    settings = HydraConfig.get()
    sweep = settings.mode == RunMode.MULTIRUN
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportAssignmentType]
    overrides = list(settings.overrides.task)
    number = settings.job.num if sweep else None
    if number is not None:
        print(f"\njob {number}: {' '.join(overrides)}", file=sys.stderr)
    try:
        code = run_one(plain, overrides, Path(settings.sweep.dir) if sweep else None, number)
    except ConfigError as error:
        if not sweep:
            raise
        print(error, file=sys.stderr)
        return REFUSED
    if sweep and code == STOPPED:
        raise SystemExit(STOPPED)  # asked to stop: not only this job
    return code


def run_one(config: dict[str, Any], overrides: list[str], sweep: Path | None, number: int | None) -> int:
    """Build, check and train one run; leaves its result and says where it is."""
    from runner.resume import claimed_directory
    from runner.run import build_run

    run = build_run(config)
    run.prepare()
    parent = sweep or Path(run.output_root) / run.name
    label = None if number is None else directory.job_name(number, overrides)
    with claimed_directory(run, parent, label, overrides) as run.directory:
        from runner.record import LogFile

        with LogFile(run.directory):
            result = trained(run)
        directory.write_json(run.directory / directory.RESULT, result.as_dict())
    print(summary(run, result))
    return _CODES[result.status]


def trained(run: Any) -> Any:
    """The result of training `run`, also when it crashed."""
    from runner.run import Result, config_hash
    from runner.train import train

    try:
        return run.parallel.launch(train, run)
    except ConfigError:
        raise
    except Exception as error:
        if run.deterministic and "deterministic" in str(error):
            why = str(error).splitlines()[0].split(". You can turn off")[0]
            raise ConfigError("deterministic", True, why, "set deterministic=false, or choose another model") from None
        log.debug("crashed", exc_info=True)
        log.error("%s: %s", type(error).__name__, error)
        return Result("crashed", config_hash=config_hash(run.config), error=f"{type(error).__name__}: {error}")


def summary(run: Any, result: Any) -> str:
    """The last words of a run: how it ended, where it is, how to look at it."""
    where = os.path.relpath(run.directory)
    lines = [f"{result.status} after step {result.steps}/{run.num_steps}, {result.seconds:.1f} s: {result.error}".rstrip(": ")]
    if best := result.best:
        lines.append(f"best {best['metric']} {best['value']:.4f} at step {best['step']}")
    lines.append(f"run: {where}")
    if result.status != "done":
        lines.append(f"log: {where}/log.txt")
    if result.status in ("stopped", "crashed"):
        lines.append(f"go on: python -m runner resume='{where}'")
    lines.append(f"look: tensorboard --logdir '{os.path.relpath(run.output_root)}'")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
