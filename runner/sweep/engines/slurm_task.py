"""What submitit runs on a node of the cluster for a job: it starts the command, and passes SLURM's signals on to it.

Only the standard library is imported at the top: the process that looks after a job needs no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runner.sweep.engines.child import STOPPED, Child, Task

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

STOP, KILL = signal.SIGHUP, signal.SIGINT
"""The signals of the scheduler: save and end for good; end at once. SLURM itself sends SIGTERM and SIGUSR2."""

_SECONDS_TO_BE_KILLED = 120.0
"""SLURM kills a job within this time after SIGTERM; KillWait and GraceTime are shorter almost everywhere."""


class SlurmTask:
    """A task that is requeued, to go on where it has stopped, when SLURM needs its node or its time is over.

    - SIGUSR2, which submitit handles: the time is over, or the job is pre-empted. It saves, and is requeued.
    - SIGTERM: SLURM is going to kill the job, because it was cancelled or pre-empted. It saves, and then waits to be
      killed, or for SIGUSR2; SLURM itself requeues a pre-empted job.
    - SIGHUP: the scheduler stops the job. It saves, and ends.
    - SIGINT: the scheduler kills the job.

    Args:
        task: what to run.
        end: the path of the file for the exit code, which is written when the job has ended for good.
    """

    def __init__(self, task: Task, end: str):
        self.task, self.end = task, end

    def __call__(self) -> int:
        self._child, self._stopping, self._terminated = Child(self.task), False, False
        signal.signal(STOP, self._stop)
        signal.signal(KILL, self._kill)
        signal.signal(signal.SIGTERM, self._terminate)
        name = "_".join(filter(None, map(os.environ.get, ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))))
        line = f"SLURM job {name or os.environ.get('SLURM_JOB_ID', '?')} on {socket.gethostname()}\n"
        try:
            self._child.run({} if self._has_gpus() else {"CUDA_VISIBLE_DEVICES": ""}, line)
            patience = time.monotonic() + _SECONDS_TO_BE_KILLED
            while self._was_saved() and self._terminated and time.monotonic() < patience:
                time.sleep(0.1)
        except Exception as error:  # submitit raises it in its signal handler, where the job is not requeued
            if self._child.code is None:
                raise
            if self._was_saved():
                self._child.say(f"SLURM has not requeued the job, which can be resumed: {error}")
        code = self._child.wait()
        part = Path(f"{self.end}.part")
        part.write_text(f"{code}\n", encoding="utf-8")
        part.replace(self.end)
        return code

    def checkpoint(self) -> DelayedSubmission | None:
        """Save, and return what goes on when the job has been requeued; None if the job is not to be requeued.

        submitit calls this method when it receives SIGUSR2.
        """
        from submitit.helpers import DelayedSubmission  # imported here: the scheduler may lack it

        self._child.stop()
        self._child.wait()
        return DelayedSubmission(SlurmTask(self.task, self.end)) if self._was_saved() else None

    def _was_saved(self) -> bool:
        return self._child.code == STOPPED and not self._stopping

    def _has_gpus(self) -> bool:
        """Return whether SLURM gave the job GPUs; otherwise it must not use those named in the user's environment."""
        return any(os.environ.get(name) for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"))

    def _stop(self, *_: object) -> None:
        self._stopping = True
        self._child.stop()

    def _kill(self, *_: object) -> None:
        self._stopping = True
        self._child.kill()

    def _terminate(self, *_: object) -> None:
        self._terminated = True
        self._child.stop()
