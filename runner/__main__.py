"""The command: compose the config, build one Run, launch it. The only place that knows Hydra's entrypoint."""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if sys.path and sys.path[0] != ROOT and os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir):
    del sys.path[0]  # `python -m` puts the caller's directory first: a models.py or secrets.py there would hide others

import logging  # noqa: E402
import shlex  # noqa: E402
import traceback  # noqa: E402
from contextlib import ExitStack, suppress  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402
from typing import Any  # noqa: E402

from runner.lazy import import_lazily  # noqa: E402

import_lazily("torch", "torchvision")

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from runner import cli, directory  # noqa: E402
from runner.config import CONF, ConfigError  # noqa: E402
from runner.explain import explained  # noqa: E402
from runner.parallel.cluster import outer_place  # noqa: E402
from runner.sweep import Sweep  # noqa: E402

DONE, CRASHED, REFUSED, DIVERGED, STOPPED, INTERRUPTED = 0, 1, 2, 3, 75, 130
_CODES = {"done": DONE, "crashed": CRASHED, "diverged": DIVERGED, "stopped": STOPPED}

log = logging.getLogger("runner")


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    code = DONE
    try:
        code = answer(sys.argv[1:])
        print(end="", flush=True)
    except BrokenPipeError:  # nobody reads on, as behind `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def answer(arguments: list[str]) -> int:
    """What `main` does, where somebody listens."""
    if {"--help", "-h"} & set(arguments):
        print(cli.help_text())
        return DONE
    try:
        codes = launch_hydra(arguments)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # a sweep that was asked to stop, and Hydra's usage errors
        return stop.code if stop.code in (DONE, STOPPED) else REFUSED
    except Exception as error:
        return failed(error)
    return next((code for code in codes if code != DONE), DONE)


def failed(error: Exception) -> int:
    """Tell what went wrong; returns the exit code."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        print(explained(error), file=sys.stderr)
    elif isinstance(error, ConfigError):
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error)
        return CRASHED
    return REFUSED


def launch_hydra(arguments: list[str]) -> list[int]:
    """Let Hydra compose the config, and call `job` once, or once a job of a sweep; returns the exit codes."""
    arguments = cli.overrides_first(arguments)
    sweep = bool({"-m", "--multirun"} & set(arguments))
    if not sweep and (source := cli.resumed(arguments)):
        from runner.resume import saved_overrides

        arguments = cli.with_saved(saved_overrides(source), arguments)
    sys.argv[1:] = [cli.quoted(argument, sweep) for argument in arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, so that `failed` can explain
    jobs = Sweep(argument for argument in arguments if not argument.startswith("-")) if sweep else None

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def composed(config: DictConfig) -> None:
        try:
            codes.append(job(config, jobs))
        except Exception as error:  # not to Hydra, which would end the sweep
            codes.append(failed(error))

    codes: list[int] = []
    with TemporaryDirectory(prefix="runner-") as scratch:
        OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
        try:
            composed()
        except (HydraException, OmegaConfBaseException, BrokenPipeError):
            raise
        except (ValueError, OSError) as error:  # what Hydra does not foresee
            raise HydraException(str(error)) from error
    if jobs is not None and codes:
        jobs.end()
        if is_first():
            print(f"\n{codes.count(DONE)} of {len(codes)} jobs done")
    return codes


def job(config: DictConfig, sweep: Sweep | None) -> int:
    """One run, alone or as a job of a sweep."""
    settings = HydraConfig.get()
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportAssignmentType]
    overrides = list(settings.overrides.task)
    if sweep is None:
        from runner.run import build_run

        run = build_run(plain)
        return run_one(run, overrides, Path(run.output_root) / run.name)
    if is_first():
        print(f"\njob {settings.job.num}: {' '.join(overrides)}", file=sys.stderr)
    code = job_of(sweep, settings.job.num, plain, overrides)
    if code == STOPPED:
        raise SystemExit(STOPPED)  # asked to stop: not only this job
    return code


def job_of(sweep: Sweep, number: int, config: dict[str, Any], overrides: list[str]) -> int:
    """One job of a sweep, unless it is done already; what becomes of it is kept in the sweep's ledger."""
    from runner.run import build_run, config_hash

    root, name, resume = (str(config[key]) for key in ("output_root", "name", "resume"))
    parent = sweep.directory(Path(root, "sweeps", name), resume)
    label, known = directory.job_name(number, overrides), config_hash(config)
    if (code := sweep.settled(parent, number, known)) is not None:
        if is_first():
            print(f"done before: {os.path.relpath(parent / label)}", file=sys.stderr)
        return code
    entry: dict[str, Any] = {"overrides": overrides, "config_hash": known, "directory": label, "error": ""}
    try:
        code = run_one(build_run(config), overrides, parent, label)
    except Exception as error:  # not to Hydra, which would end the sweep
        code, entry["error"] = failed(error), str(error)
    sweep.note(parent, number, **entry, code=code)
    return code


def is_first() -> bool:
    """Whether this is the process that talks: of those that torchrun or SLURM started, the one of rank 0."""
    place = outer_place()
    return place is None or place.rank == 0


def run_one(run: Any, overrides: list[str], parent: Path, label: str | None = None) -> int:
    """Check and train one run, in a directory under `parent`; says where its result is."""
    from runner.resume import claimed_directory
    from runner.run import check_used

    check_used(run, overrides)
    run.prepare()
    with run.parallel.joined(run), ExitStack() as claims:
        claim = partial(claimed_directory, run, parent, label, overrides)
        run.directory = run.parallel.on_rank_0(lambda: claims.enter_context(claim()))
        from runner.record import LogFile

        with LogFile(run.directory, run.parallel.rank):
            result = trained(run)
        if run.parallel.rank == 0:
            tell(run, result)
    return _CODES[result.status]


def tell(run: Any, result: Any) -> None:
    """Leave the result, and say where."""
    try:
        directory.write_json(run.directory / directory.RESULT, result.as_dict())
    except OSError as error:  # a full disk: the summary is all that is left to tell
        print(f"{directory.RESULT} cannot be written: {error.strerror}", file=sys.stderr)
    with suppress(BrokenPipeError):
        print(summary(run, result), flush=True)


def trained(run: Any) -> Any:
    """The result of training `run`, also when it crashed."""
    from runner.parallel.crew import RankError
    from runner.resume import finished
    from runner.run import CrashedError, Result, config_hash
    from runner.session import session

    if (done := run.parallel.on_rank_0(partial(finished, run))) is not None:
        log.info("all %d steps are done: nothing is left to do (more: epochs=N or steps=N)", done.steps)
        return done
    trace = ""  # of another process; of this one the log tells
    try:
        return run.parallel.launch(session, run)
    except ConfigError:
        raise
    except RankError as failure:
        result = failure.result or Result(
            "crashed", directory.newest_step(run.directory), config_hash=config_hash(run.config)
        )
        result.error, error, trace = str(failure), failure, failure.trace
    except CrashedError as crash:
        result, error = crash.result, crash.__cause__
    except Exception as early:  # before the first step
        result = Result("crashed", config_hash=config_hash(run.config), error=f"{type(early).__name__}: {early}")
        error = early
    if run.deterministic and "deterministic" in str(error):
        why = str(error).splitlines()[0].split(". You can turn off")[0]
        raise ConfigError("deterministic", True, why, "set deterministic=false, or choose another model")
    if "Expected more than 1 value per channel" in str(error):
        why = "batch normalisation would see one sample of one pixel, which has no variance"
        larger = "more samples that go through together (batch_size, accumulation.steps, parallel.split_size)"
        raise ConfigError("batch_size", run.batch_size, why, f"{larger}, larger images, or model.norm=group")
    print(trace, end="", file=sys.stderr)
    log.debug("crashed", exc_info=error)
    log.error("%s", result.error)
    return result


def summary(run: Any, result: Any) -> str:
    """The last words of a run: how it ended, where it is, how to look at it."""
    where, logs = (shlex.quote(os.path.relpath(path)) for path in (run.directory, run.output_root))
    steps = f"{result.steps}/{max(result.steps, run.num_steps)}"
    lines = [f"{result.status} after step {steps}" + (f", {result.seconds:.1f} s" if result.seconds else "")]
    lines[0] += f": {result.error}" if result.error and result.status != "crashed" else ""  # told already
    if best := result.best:
        lines.append(f"best {best['metric']} {best['value']:.4f} at step {best['step']}")
    lines.append(f"run: {where}")
    if result.status != "done":
        lines.append(f"log: {where}/log.txt")
        if any((run.directory / "checkpoints").glob("step_*")):
            other = " optimizer.lr=…" if result.status == "diverged" else ""
            lines.append(f"go on: python -m runner resume={where}{other}")
    lines.append(f"look: tensorboard --logdir {logs}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
