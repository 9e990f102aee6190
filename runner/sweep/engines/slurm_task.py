"""The task that submitit runs on a cluster node for a job: it starts the job's command, and handles SLURM's signals.

No third-party package is imported at the top of this module, so that the process of the task does not load torch,
which it does not need.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runner.sweep.engines.child import Child, Task
from runner.system.exit_codes import STOPPED

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

STOP, KILL = signal.SIGHUP, signal.SIGINT
"""Signals that the scheduler of the sweep sends. After `STOP`, a job saves a checkpoint and exits for good. `KILL` ends
a job at once. SLURM itself sends SIGTERM and SIGUSR2."""

_SECONDS_TO_BE_KILLED = 120.0
"""Seconds that a task waits to be killed after SIGTERM, once the job has saved a checkpoint.

SLURM kills a job KillWait or GraceTime seconds after SIGTERM. Almost all clusters set both to less than this.
"""


class SlurmTask:
    """A task that saves a checkpoint and is requeued when its time limit is reached, or when SLURM preempts it.

    The task handles all of these signals except SIGUSR2, for which submitit calls `checkpoint`:

    - SIGUSR2: the time limit is reached, or the job is preempted. The job saves a checkpoint, and is requeued.
    - SIGTERM: SLURM is going to kill the job, because the job was canceled or preempted. The job saves a checkpoint,
      and the task then waits until it is killed or receives SIGUSR2. SLURM itself requeues a preempted job.
    - SIGHUP: the scheduler of the sweep stops the job. The job saves a checkpoint, and ends.
    - SIGINT: the scheduler of the sweep kills the job.

    When the job has ended for good, its exit code is written to the file `end`.
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
        except Exception as error:  # raised by submitit's signal handler if it does not requeue the job
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
        """Save a checkpoint, and return the task to requeue, or None; submitit calls this method on SIGUSR2."""
        from submitit.helpers import DelayedSubmission

        self._child.stop()
        self._child.wait()
        return DelayedSubmission(SlurmTask(self.task, self.end)) if self._was_saved() else None

    def _was_saved(self) -> bool:
        return self._child.code == STOPPED and not self._stopping

    def _has_gpus(self) -> bool:
        """Return whether SLURM allocated GPUs to the job. If not, `__call__` hides the node's GPUs from the job."""
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
