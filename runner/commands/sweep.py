"""`python -m runner sweep PATH` shows, follows, stops or resumes a sweep.

Without an option, it prints the number of jobs in each state, the last line that each running job has printed, and the
errors of failed jobs.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.analysis.output import one_line
from runner.analysis.saved_runs import is_locked
from runner.commands.arguments import Parser
from runner.config.errors import ConfigError, check, escaped
from runner.config.overrides import hydra_quoted, override_key
from runner.storage.files import check_readable
from runner.storage.ledger_file import LEDGER, num_jobs, read_ledger
from runner.sweep.console import is_open_in, last_line
from runner.sweep.ledger import CONSOLE, STUDY
from runner.sweep.unfinished_commands import remembered_command
from runner.system.console import reader_left
from runner.system.import_path import python_path
from runner.system.utf8 import printable

_POLL_SECONDS = 0.5
_FAILED = ("crashed", "refused", "diverged")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    The exit code is 0, or 2 after printing an error message to standard error. With `--follow`, the exit code is 1 if a
    job has failed (see `follow`). With `--resume`, it is the exit code of the sweep.
    """
    try:
        options = _parser().parsed(arguments)
        path = Path(os.path.expanduser(options.path))
        check_readable("PATH", path / LEDGER)
        check((path / LEDGER).is_file(), "PATH", str(path), f"it has no {LEDGER}", "name the directory of a sweep")
        if options.resume:
            return resume(path)
        if options.cancel or options.kill:
            cancel(path, at_once=options.kill)
            return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.follow:
        return follow(path)
    print("\n".join(lines(path, read_ledger(path))))
    return 0


def _parser() -> Parser:
    parser = Parser("sweep", "Show, follow, stop or resume a sweep.")
    parser.add_argument("path", metavar="PATH", help="the directory of the sweep: outputs/sweeps/NAME/DATE…")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--follow", action="store_true", help="print what happens until the sweep ends")
    what.add_argument("--cancel", action="store_true", help="let the running jobs save and stop")
    what.add_argument("--kill", action="store_true", help="end the running jobs at once")
    what.add_argument("--resume", action="store_true", help="go on with a sweep that was stopped")
    return parser


def lines(path: Path, ledger: dict[str, Any]) -> list[str]:
    """Return a description of the sweep at `path`, as a list of lines.

    Args:
        path: the directory of the sweep.
        ledger: the content of the sweep's ledger. Somebody else may have written it; therefore, control characters are
            escaped in the returned lines.
    """
    jobs = ledger.get("jobs", {})
    counts = Counter(str(entry.get("state", "")) for entry in jobs.values())
    parts = [f"{count:,} {state}" for state, count in sorted(counts.items()) if state]
    waiting = num_jobs(ledger) - len(jobs)
    what = ", ".join([*parts, *([f"{waiting:,} not begun"] if waiting else [])]) or "no job has begun"
    if is_locked(path):
        state = f"running, process {ledger.get('pid', 0)}"
    else:
        state = "complete" if ledger.get("complete") else "stopped; --resume goes on"
    shown = [f"{path}: {state}", what]
    for number, entry in sorted(jobs.items(), key=lambda item: int(item[0])):
        name = one_line(entry.get("directory") or number)
        if entry.get("state") == "running":
            console = path / CONSOLE / f"{int(number):03d}.txt"
            shown.append(f"  {name} ({entry.get('slot', '')}): {last_line(console)}")
        elif entry.get("state") in _FAILED:
            error = str(entry.get("error", "")).strip().partition("\n")[0]
            shown.append(f"  {name}: {entry['state']}{f': {error}' if error else ''}")
    return [escaped(printable(line)) for line in shown]


def follow(path: Path) -> int:
    """Print each change of a job's state while the sweep runs.

    Once the sweep has ended, print a description of the sweep (see `lines`). Return 1 if a job has crashed, was refused
    or has diverged, otherwise 0. In a search, a job that has diverged does not count as failed, because divergence is a
    valid result of a trial.
    """
    failed = [state for state in _FAILED if state != "diverged" or not (path / STUDY).exists()]
    known: dict[str, str] = {}
    while True:
        running = is_locked(path)  # before the ledger is read, so that the last changes are not missed
        jobs = read_ledger(path).get("jobs", {})
        for number, entry in jobs.items():
            state = str(entry.get("state", ""))
            if known.get(number) != state:
                known[number] = state
                print(escaped(printable(f"{entry.get('directory') or number}: {state}")), flush=True)
        if reader_left():
            return 0
        if not running:
            print("\n".join(lines(path, read_ledger(path))))
            return int(any(state in failed for state in known.values()))
        time.sleep(_POLL_SECONDS)


def cancel(path: Path, at_once: bool) -> None:
    """Ask the process that runs the sweep at `path` to stop, and wait until it has ended.

    Args:
        path: the directory of the sweep.
        at_once: whether to end the jobs at once, without saving checkpoints.

    Raises:
        ConfigError: if no process of this user on this machine runs the sweep, or the system has no /proc.
    """
    lock, pid = path / ".lock", read_ledger(path).get("pid", 0)
    check(is_locked(path), "PATH", str(path), "no process runs this sweep", "--resume goes on with it")
    why = "the process that runs this sweep cannot be found here: it is on another machine, or another user's"
    if not os.path.isdir("/proc"):
        why = "this system has no /proc, in which the process that runs this sweep could be found"
    check(pid > 1 and is_open_in(pid, lock), "PATH", str(path), why, "stop it where it was started, with Ctrl-C")
    with suppress(ProcessLookupError):  # the sweep has just ended
        os.kill(pid, signal.SIGTERM)
        if at_once:
            time.sleep(_POLL_SECONDS)  # by then, the first signal has been handled, and the second one ends all jobs
            if is_open_in(pid, lock):
                os.kill(pid, signal.SIGINT)
    while is_locked(path):
        time.sleep(_POLL_SECONDS)
    print("\n".join(lines(path, read_ledger(path))))


def resume(path: Path) -> int:
    """Run the command of the sweep at `path` again with `resume=auto`, and return the exit code of the command.

    Raises:
        ConfigError: if the sweep is running or complete; if its command is not in the current user's cache, for
            example because another user started the sweep, or because the sweep's directory was moved; or if its
            command contains a credential, because the cache does not store credentials.
    """
    ledger, words = read_ledger(path), remembered_command(path)
    check(not is_locked(path), "PATH", str(path), "a process runs this sweep", "--follow shows it")
    check(not ledger.get("complete"), "PATH", str(path), "the sweep is complete", "type its command to run it again")
    remedy = "type the command of the sweep again, with resume=auto"
    why = "you have not started this sweep in this place, and a command of somebody else is not run"
    check(bool(words), "PATH", str(path), why, remedy)
    why = "its command was not kept because of a secret in it"
    check(not any("***" in word for word in words), "PATH", str(path), why, remedy)
    output_root = path.resolve().parents[2]  # OUTPUT_ROOT/sweeps/NAME/DATE…
    kept = [word for word in words if override_key(word) not in ("output_root", "resume")]
    typed = ["-m", *kept, f"output_root={hydra_quoted(str(output_root))}", "resume=auto"]
    print(escaped(printable(f"python -m runner {shlex.join(typed)}")), flush=True)
    return subprocess.run(
        [sys.executable, "-m", "runner", *typed], check=False, env=os.environ | python_path()
    ).returncode
