"""Trains a run in the process of a program or a notebook, without changing the settings of this process."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch

from runner.api.composing import Config, check_list_of_texts, compose
from runner.api.run_job import run_one
from runner.config import user_code
from runner.config.composition import Job
from runner.config.errors import ABSENT, check
from runner.planning.auto_accumulation import resolve_auto_accumulation
from runner.result import CrashedError, Result
from runner.run import build_run
from runner.seeds import random_states, set_random_states
from runner.system import accelerator
from runner.system.forkserver import server_stopped
from runner.system.lazy_import import undo_defer

log = logging.getLogger(__name__)
_training = threading.RLock()


def train(config: Config | Sequence[str] = (), **code: Any) -> Result:
    """Train a run with `config`, and return the result.

    Depending on the parallel mode, the run trains in this process or in processes that it starts.

    As with the command, the run writes its directory, and logs to standard error. In the main thread, a stop signal
    (Ctrl-C, the stop button of a notebook) ends the training after the current step: the result then has the status
    `stopped`, and `train(["resume=DIRECTORY"])` continues the run. A second Ctrl-C raises `KeyboardInterrupt`.

    Args:
        config: a composed config, or the overrides of one: `["parallel=ddp", "optimizer.lr=0.1"]`.
        code: code of your own, for which the overrides have to be given: `model`, a module, or a class or function that
            makes one; `data`, training and held-out samples (see `UserData`); `collate`, a function that makes a batch
            of a list of samples; `loss`, a function of (outputs, targets) that returns their mean, or (sum, count), or
            a dict of these; `metrics`, a dict from names to functions of (outputs, targets) or objects of
            torchmetrics; or in place of both `training_step` or `phases`, and `evaluation_step`, functions of (model,
            batch); `schedule`, a function of (step, num_steps) that returns the factor of the learning rate (see
            `runner.schedule`); and the hooks `after_step`, `after_evaluation` and `before_save` (see `Hooks`).
            A run does not save them: pass them again to resume it, as in `train(["resume=DIRECTORY"], model=Net)`.

    Returns:
        The result, whose status is `done`, `stopped` or `diverged`.

    Raises:
        ConfigError: if the config cannot run; no files are left behind.
        CrashedError: if the training crashed. Its `__cause__` is the error, and its `result` has the run directory.
    """
    is_composed = isinstance(config, Config)
    overrides = config.overrides if is_composed else check_list_of_texts(config)
    why = "code belongs to the overrides of a config that is not composed yet"
    check(not (code and is_composed), "config", ABSENT, why, "train([…], model=…)")
    given = user_code.passed(overrides, **code)
    composed = config if is_composed else compose(given.added_to(overrides))

    def again(overrides: Sequence[str]) -> Job:
        other = compose(given.added_to(overrides), config_dir=composed.config_dir)
        return Job(dict(other), list(other.overrides))

    with settings_kept(), user_code.using(given):
        generated = {*given.added_to(overrides)} - {*overrides}
        typed = [word for word in composed.overrides if word not in generated]
        job = resolve_auto_accumulation(Job(deepcopy(dict(composed)), typed), again)
        result = run_one(build_run(job.config), job.overrides)
    if result.status == "crashed":
        raise CrashedError(result) from result.cause
    return result


@contextmanager
def settings_kept() -> Iterator[None]:
    """A context in which the settings of the caller do not affect a run; what it changes is restored at the end.

    These settings, the random states and the code that is given are of the whole process: other threads wait for it.
    """
    with ExitStack() as restored:
        if not _training.acquire(blocking=False):
            log.warning(
                "this thread waits: another one trains, and the process has one set of random numbers and settings"
            )
            _training.acquire()
        later = restored.callback
        later(_training.release)
        later(_restore_environment, dict(os.environ))
        logger = logging.getLogger("runner")
        later(logger.setLevel, logger.level)
        later(setattr, logger, "propagate", logger.propagate)
        later(_restore_interpreter, warnings.showwarning)
        restored.enter_context(server_stopped())

        later(set_random_states, random_states(()), ())
        kind = accelerator.accelerator_type()
        if kind is not None and getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
            for device in (torch.device(kind, index) for index in range(torch.accelerator.device_count())):
                later(accelerator.set_random_state, device, accelerator.random_state(device))
            restored.enter_context(torch.accelerator.device_index(torch.accelerator.current_device_index()))

        later(torch.set_num_threads, torch.get_num_threads())
        later(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        later(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        later(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        if (device := torch.get_default_device()).type != "cpu":
            later(torch.set_default_device, device)
            torch.set_default_device(None)
        restored.enter_context(torch.inference_mode(False))
        restored.enter_context(torch.enable_grad())
        for device_type in ("cpu", kind or "cpu"):
            if torch.is_autocast_enabled(device_type):
                # Without the cache of weights, as it is emptied only at the end of the caller's context: a run that
                # enables autocast again would use the weights of its first step in all steps.
                restored.enter_context(torch.autocast(device_type, enabled=False, cache_enabled=False))
        yield


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _restore_interpreter(show_warning: Any) -> None:
    if warnings.showwarning is not show_warning and show_warning.__module__ == "logging":  # the run ended the capture
        logging.captureWarnings(True)
    undo_defer("torch._dynamo")
