"""Tests of `Trial`: it trains in its own processes, which end with the process that started them."""

import signal
from multiprocessing import Pipe
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from helpers.compose import TINY_CPU, compose_config

from runner import training
from runner.parallel.collectives import Collectives
from runner.planning import trial as module
from runner.planning.trial import Trial, TrialError

TIMEOUT_SECONDS = 300.0
"""A timeout in seconds that no test reaches, even on a slow machine."""


def processes_of(trial: Trial) -> list[psutil.Process]:
    process = psutil.Process(trial._process.pid)
    return [process, *process.children(recursive=True)]


def test_a_trial_trains_and_ends():
    trial = Trial(compose_config(*TINY_CPU, "parallel=ddp"), TIMEOUT_SECONDS)
    processes = processes_of(trial)
    assert len(processes) >= 3, "the ranks, and the process that supervises them"
    burst = trial.burst(TIMEOUT_SECONDS)
    assert 0 < burst.step_seconds < trial.startup_seconds
    assert burst.memory_bytes > 5e7
    trial.close()
    assert psutil.wait_procs(processes, TIMEOUT_SECONDS)[1] == []


@pytest.mark.slow
def test_compiled_code_is_kept_apart_from_that_of_other_runs():
    trial = Trial(compose_config(*TINY_CPU, "parallel=ddp", "compile=true"), TIMEOUT_SECONDS)
    directory = Path(trial._directory.name)
    assert list(directory.glob("compiled/**/*.so"))
    trial.close()
    assert not directory.exists()


def test_a_config_that_is_refused_is_an_error():
    with pytest.raises(TrialError, match="batch_size") as caught:
        Trial(compose_config(*TINY_CPU, "batch_size=63", "parallel=ddp"), TIMEOUT_SECONDS)
    assert caught.value.status == "refused"


@pytest.mark.parametrize(
    ("mode", "number"), [("single", signal.SIGKILL), ("ddp", signal.SIGKILL), ("single", signal.SIGSEGV)]
)
def test_a_trial_that_is_killed_is_an_error(mode, number):
    """Linux kills a process with SIGKILL where memory runs out: one of the ranks or, with a single one, the trial."""
    trial = Trial(compose_config(*TINY_CPU, f"parallel={mode}"), TIMEOUT_SECONDS)
    processes_of(trial)[-1].send_signal(number)
    with pytest.raises(TrialError, match=number.name) as caught:
        trial.burst(TIMEOUT_SECONDS)
    assert (caught.value.status, caught.value.out_of_memory) == ("crashed", number == signal.SIGKILL)
    trial.close()


def test_a_trial_ends_with_the_process_that_started_it_or_if_it_takes_too_long():
    with pytest.raises(TrialError, match="no step within 0 s"):
        Trial(compose_config(*TINY_CPU), 0.0)
    trial = Trial(compose_config(*TINY_CPU), TIMEOUT_SECONDS)
    trial._connection.close()  # as the kernel does when that process is killed
    trial._process.join(TIMEOUT_SECONDS)
    assert trial._process.exitcode == 0
    trial._directory.cleanup()


def test_an_error_without_a_message_is_sent_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train_step", mock.Mock(side_effect=MemoryError))
    received, sent = Pipe()
    with pytest.raises(MemoryError):
        module._train_rank(compose_config(*TINY_CPU), tmp_path, sent, Collectives([torch.device("cpu")]))
    error = received.recv()
    assert (error.why, error.out_of_memory) == ("MemoryError", True)


def test_a_step_that_runs_out_of_memory_raises_an_out_of_memory_error():
    # The first convolution returns 1.2 GiB. Smaller blocks are kept in the process for the next step.
    sizes = ["data.size=32", "batch_size=1600", "data.num_samples=1608", "data.holdout=8", "model.channels=[200,4]"]
    words = ["model=convnet", "model.kernel_size=1", "model.freeze=[conv1]", "data=synthetic", *sizes]
    words += ["device=cpu", "device.threads=1"]
    trial = Trial(compose_config(*words), TIMEOUT_SECONDS)
    process = psutil.Process(trial._process.pid)
    enough = process.memory_info().vms + 10_000_000  # for Python
    process.rlimit(psutil.RLIMIT_AS, (enough, enough))
    with pytest.raises(TrialError) as caught:
        trial.burst(TIMEOUT_SECONDS)
    trial.close()
    assert caught.value.out_of_memory, caught.value.why
    assert caught.value.status == "crashed"
