"""`python -m helpers.dead_fork_server` kills the fork server of a supervisor, and then starts another supervisor.

It prints the error of the first supervisor, and what the processes of the second one return.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

from helpers.command_server import fork_server_from_fork
from helpers.supervisor_functions import RETURN_ONE, SLEEP_SECONDS, report_result_of, sleep_until_killed
from runner.parallel.launch.supervisor import RankError, Supervisor
from runner.system.forkserver import start_server
from runner.system.signals import StopRequest


def main() -> None:
    with fork_server_from_fork():
        start_server("runner.parallel.launch.supervisor")
    with Supervisor(report_result_of, [(sleep_until_killed,)] * 2, SLEEP_SECONDS) as ranks:
        pids = [process.pid for process in ranks.processes]
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        try:
            ranks.wait(StopRequest())
        except RankError as error:
            print(error)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)
    with fork_server_from_fork():
        start_server("runner.parallel.launch.supervisor")
    with Supervisor(report_result_of, [(RETURN_ONE,)] * 2, SLEEP_SECONDS) as ranks:
        print(ranks.wait(StopRequest()))


if __name__ == "__main__":
    main()
