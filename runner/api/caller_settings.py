"""The settings of the process that calls the Python API: they do not affect a run, and a run does not change them."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from runner.system.forkserver import server_stopped
from runner.system.lazy_import import undo_defer


@contextmanager
def settings_kept() -> Iterator[None]:
    """A context in which a run may change global settings. They are restored at the end of the context.

    These are the environment variables, logging, random states, the current CUDA device, torch's threads and defaults,
    the fork server, the deferred import of the compiler, the handler of SIGCHLD and what garbage collection excludes.
    Inside the context, torch has its original default dtype and device, gradients are enabled, and autocast is
    disabled, so that the caller's choices do not affect the run.
    """
    with ExitStack() as restored:
        of_torch = (_cuda_device, _random_state, _torch_defaults, _autocast_disabled)
        for keep in (_environment, _logging, _interpreter, server_stopped, *of_torch):
            restored.enter_context(keep())
        yield


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _logging() -> Iterator[None]:
    logger, show = logging.getLogger("runner"), warnings.showwarning
    level, propagate = logger.level, logger.propagate
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        if warnings.showwarning is not show and show.__module__ == "logging":  # the run's log file ended the capture
            logging.captureWarnings(True)


@contextmanager
def _interpreter() -> Iterator[None]:
    handler, num_frozen = signal.getsignal(signal.SIGCHLD), gc.get_freeze_count()
    try:
        yield
    finally:
        undo_defer("torch._dynamo")
        # DataLoader replaces the handler. Without its own, it still notices within 5 s that a worker has died.
        if signal.getsignal(signal.SIGCHLD) is not handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        if num_frozen == 0:
            gc.unfreeze()


@contextmanager
def _cuda_device() -> Iterator[None]:
    # Otherwise, there is nothing to restore. `torch.cuda.device` makes no context on the device that it restores.
    with torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext():
        yield


@contextmanager
def _random_state() -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    on_metal = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if on_metal is not None:
            torch.mps.set_rng_state(on_metal)


@contextmanager
def _torch_defaults() -> Iterator[None]:
    threads, dtype, device = torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device()
    matmul, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_default_dtype(torch.float32)
    if device.type != "cpu":
        torch.set_default_device(None)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        if device.type != "cpu":
            torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = tf32
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def _autocast_disabled() -> Iterator[None]:
    with ExitStack() as disabled:
        for kind in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(kind):
                # Without the cache of weights, as it is emptied only at the end of the caller's context: a run that
                # enables autocast again would use the weights of its first step in all steps.
                disabled.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        yield
