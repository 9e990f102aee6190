"""`main` prints what training changes in the process, as JSON; it runs in `python -c`, like a notebook."""

import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

SMALL = ("model=tiny", "steps=4", "batch_size=6", "data.size=8", "device=cpu")


def of_interpreter() -> dict[str, Any]:
    logger = logging.getLogger("runner")
    return {
        "logging": (logging.root.manager.disable, logging.root.level, len(logging.root.handlers)),
        "logger": (logger.level, logger.propagate, logger.disabled, len(logger.handlers)),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)),
        "imports": (sys.meta_path.copy(), sys.path.copy(), sys.path_hooks.copy(), sys.modules["__main__"]),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "threads": [thread.name for thread in threading.enumerate()],
        "warnings": (list(warnings.filters), warnings.showwarning),
        "random": random.getstate(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "process": (os.getcwd(), sys.argv.copy(), os.nice(0), getattr(os, "sched_getaffinity", id)(0)),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval(), locale.setlocale(locale.LC_ALL)),
        "children": (multiprocessing.get_start_method(allow_none=True), multiprocessing.active_children()),
    }


def of_torch() -> dict[str, Any]:
    import numpy
    import torch

    backends = torch.backends
    return {
        "compiler": ("torch._dynamo" in sys.modules, "_dynamo" in vars(torch)),
        "rng": (torch.get_rng_state().tolist(), [str(part) for part in numpy.random.get_state()]),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled),
        "cudnn": (backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32),
        "precision": (torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "sharing": (torch.multiprocessing.get_sharing_strategy(), torch.distributed.is_initialized()),
        "numpy": (numpy.geterr(), numpy.get_printoptions()),
    }  # fmt: skip


def main() -> None:
    """Print the names of the settings that each step has changed, and what became of the processes."""
    assert not hasattr(sys.modules["__main__"], "__file__"), "or it would not be like a notebook"
    changed = {}

    def compare(step: str, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        changed[step] = [name for name, value in before.items() if value != now[name]]
        return now

    before = of_interpreter()
    import runner

    runner.compose([*SMALL])
    compare("import and compose", before, of_interpreter())

    import gymnasium  # noqa: F401
    import tensorboard.compat.tensorflow_stub  # noqa: F401
    import torch.utils.tensorboard

    from helpers.command_server import fork_server_from_fork

    random.seed(1)
    logging.disable(logging.INFO)
    logging.captureWarnings(True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    torch.set_default_dtype(torch.float64)
    compiler = {"compiler": of_torch()["compiler"]}
    runner.train([*SMALL])  # torch and others change something when they are first used
    compare("first run", compiler, of_torch())
    before = of_interpreter() | of_torch()
    images = ("data=imagefolder", f"data.root={sys.argv[1]}", "data.workers=1")
    with fork_server_from_fork():  # in a new interpreter, each server would import torch again
        for words in (("optimizer.lr=900", "schedule=constant", "steps=40"), images, ("parallel=ddp",)):
            result = runner.train([*SMALL, *words])
            before = compare(" ".join(words[:1]), before, of_interpreter() | of_torch())
            print(json.dumps([result.status, result.world_size]))
    runner.load(result.directory).evaluate("last", ["parallel=single"])  # pyright: ignore
    compare("evaluate", before, of_interpreter() | of_torch())
    child = multiprocessing.get_context("forkserver").Process(target=signal.pause)
    child.start()
    child.terminate()  # SIGTERM is blocked in children of the runner's fork server
    child.join()
    print(json.dumps(child.exitcode))
    print(json.dumps(changed))
