"""A fake SLURM with one node, whose programs (`python -m helpers.fake_slurm PROGRAM ARGUMENT …`) start quickly."""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
ACTIVE_STATES = ("PENDING", "RUNNING")
KILL_WAIT = 0.5
"""Seconds between SIGTERM and SIGKILL when a job is canceled; 30 in SLURM."""


@contextmanager
def locked_state(directory: Path) -> Iterator[dict[str, Any]]:
    """A context that locks the state of the cluster, yields it, and saves changes."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = directory / "state.json"
        known = json.loads(path.read_text()) if path.exists() else {"jobs": {}, "calls": [], "faults": {}, "last": 100}
        yield known
        part = directory / "state.part"
        part.write_text(json.dumps(known))
        part.replace(path)


class FakeSlurm:
    def __init__(self, directory: Path):
        self.directory = directory
        programs = directory / "bin"
        programs.mkdir(parents=True)
        for name in PROGRAMS:
            file = programs / name
            file.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -m helpers.fake_slurm {name} "$@"\n')
            file.chmod(0o755)
        self.variables = {
            "FAKE_SLURM": str(directory),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(str(path) for path in Path(__file__).parents[1:3]),
        }

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        with locked_state(self.directory) as known:
            return known["jobs"]

    def calls(self, program: str) -> list[list[str]]:
        with locked_state(self.directory) as known:
            return [words for name, *words in known["calls"] if name == program]

    def fail(self, program: str, times: int, out: str = "", err: str = "", code: int = 1) -> None:
        """Replace the next `times` calls of `program`: each call prints `out` and `err`, and exits with `code`."""
        with locked_state(self.directory) as known:
            known["faults"][program] = [times, out, err, code]

    def hold(self) -> None:
        """Keep pending jobs from starting."""
        with locked_state(self.directory) as known:
            known["held"] = True

    def signal(self, job: str, *numbers: signal.Signals) -> None:
        """Send signals to the process of a job, as SLURM does at the job's time limit, or when it preempts the job."""
        for number in numbers:
            os.kill(self.jobs[job]["step"], number)

    def end(self, job: str, final: str, forgotten: bool = False) -> None:
        """Kill the process group of the job's batch script, so that the job ends in the state `final`."""
        with locked_state(self.directory) as known:
            known["jobs"][job] |= {"final": final, "forgotten": forgotten}
            batch = known["jobs"][job]["batch"]
        os.killpg(batch, signal.SIGKILL)

    def close(self) -> None:
        for job in self.jobs.values():
            for name in ("slurmd", "batch"):
                with suppress(OSError, KeyError):
                    os.killpg(job[name], signal.SIGKILL)


def sbatch(directory: Path, words: list[str]) -> None:
    script = Path(words[0]).read_text()
    lines = [shlex.split(line[len("#SBATCH ") :])[0] for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = {flag[2:]: value for flag, _, value in (line.partition("=") for line in lines)}
    array = re.fullmatch(r"0-(\d+)%(\d+)", options.get("array", ""))
    with locked_state(directory) as known:
        known["last"] += 1
        main = str(known["last"])
        indices = range(int(array[1]) + 1) if array else [None]
        new = {main if index is None else f"{main}_{index}": index for index in indices}
        same = {"main": main, "state": "PENDING", "script": script, "options": options, "starts": 0}
        same |= {"at_once": int(array[2]) if array else 1, "env": dict(os.environ)}
        known["jobs"] |= {job: same | {"index": index} for job, index in new.items()}
    for job in new:
        start = [sys.executable, "-S", "-m", "helpers.fake_slurm", "slurmd", job]
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(start, start_new_session=True, **nowhere)
        with locked_state(directory) as known:
            known["jobs"][job]["slurmd"] = process.pid
    print(f"Submitted batch job {main}")


def slurmd(directory: Path, words: list[str]) -> None:
    """Run a job as soon as it may start, and again whenever it is requeued."""
    name = words[0]
    while may_start(directory, name):
        code = run_script(directory, name)
        with locked_state(directory) as known:
            job = known["jobs"][name]
            if job.pop("requeue", False):
                job["state"] = "PENDING"
                continue
            ended = "COMPLETED" if code == 0 else "FAILED"
            job["state"] = job.get("final") or ("CANCELLED" if job.get("cancelled") else ended)
            return


def may_start(directory: Path, name: str) -> bool:
    """Wait until a job may run, and return True; return False if it was canceled."""
    while True:
        with locked_state(directory) as known:
            job = known["jobs"][name]
            if job["state"] != "PENDING":
                return False
            of_array = [each for each in known["jobs"].values() if each["main"] == job["main"]]
            running = sum(each["state"] == "RUNNING" for each in of_array)
            if not known.get("held") and running < job["at_once"]:
                job["state"] = "RUNNING"
                job["starts"] += 1
                job.pop("step", None)
                return True
        time.sleep(0.05)


def run_script(directory: Path, name: str) -> int:
    with locked_state(directory) as known:
        job = known["jobs"][name]
    script = directory / f"{name}.sh"
    script.write_text(job["script"])
    gpus = int(job["options"].get("gpus-per-node", 0))
    more = {"SLURM_JOB_ID": job["main"], "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"}
    if job["index"] is not None:
        more |= {"SLURM_ARRAY_JOB_ID": job["main"], "SLURM_ARRAY_TASK_ID": str(job["index"])}
    if gpus:
        numbers = ",".join(map(str, range(gpus)))
        more |= {"CUDA_VISIBLE_DEVICES": numbers, "SLURM_JOB_GPUS": numbers}
    with (directory / f"{name}.out").open("a") as out:
        batch = subprocess.Popen(
            ["/bin/bash", script], env=job["env"] | more, stdout=out, stderr=out, start_new_session=True
        )
        with locked_state(directory) as known:
            known["jobs"][name]["batch"] = batch.pid
        kill_at = None
        while batch.poll() is None:
            with locked_state(directory) as known:
                job = known["jobs"][name]
            if kill_at is None and (job.get("cancelled") or job.get("requeue")):
                kill_at = time.monotonic() + KILL_WAIT
            if kill_at is not None and time.monotonic() > kill_at:
                with suppress(ProcessLookupError):
                    os.killpg(batch.pid, signal.SIGKILL)
            time.sleep(0.05)
        return batch.returncode


def srun(directory: Path, words: list[str]) -> None:
    out = ""
    while words[0].startswith("--"):
        flag = words.pop(0)
        if flag in ("--output", "--error"):
            out = words.pop(0)
    main, index = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID")
    name = main if index is None else f"{main}_{index}"
    os.environ.update({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    path = out.replace("%A", main).replace("%a", index or "").replace("%j", main).replace("%t", "0")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    with locked_state(directory) as known:
        known["jobs"][name]["step"] = os.getpid()
    program = words[0]
    os.execv(program, words)


def squeue(directory: Path, words: list[str]) -> None:
    [form] = [word.partition("=")[2] for word in words if word.startswith("--format=")]
    assert "--states=all" in words
    print(form.replace("%i", "7+0").replace("%j", "another|job").replace("%T", "RUNNING"))
    with locked_state(directory) as known:
        for name, job in known["jobs"].items():
            if not job.get("forgotten"):
                line = form.replace("%i", name).replace("%j", job["options"]["job-name"])
                print(line.replace("%T", job["state"]))


def scancel(directory: Path, words: list[str]) -> None:
    flags = {flag: value for flag, _, value in (word[2:].partition("=") for word in words if word.startswith("--"))}
    names = [word for word in words if not word.startswith("--")]
    code = 0
    with locked_state(directory) as known:
        if "name" in flags:
            names = [name for name, job in known["jobs"].items() if job["options"]["job-name"] == flags["name"]]
        for name in names:
            job = known["jobs"][name]
            if "signal" in flags:
                if job["state"] == "RUNNING" and "step" in job:
                    with suppress(ProcessLookupError):
                        os.kill(job["step"], signal.Signals[f"SIG{flags['signal']}"])
                else:
                    code = 1
            elif job["state"] == "PENDING":
                job["state"] = "CANCELLED"
            elif job["state"] == "RUNNING" and "state" not in flags:
                job["cancelled"] = True
                with suppress(ProcessLookupError, KeyError):
                    os.kill(job["step"], signal.SIGTERM)
    raise SystemExit(code)


def scontrol(directory: Path, words: list[str]) -> None:
    action, name = words
    assert action == "requeue", words
    with locked_state(directory) as known:
        known["jobs"][name]["requeue"] = True


def main() -> None:
    program, *words = sys.argv[1:]
    directory = Path(os.environ["FAKE_SLURM"])
    if program in PROGRAMS:
        with locked_state(directory) as known:
            known["calls"].append([program, *words])
            times, out, err, code = known["faults"].get(program, [0, "", "", 0])
            if times:
                known["faults"][program][0] -= 1
        if times:
            sys.stdout.write(out)
            sys.stderr.write(err)
            raise SystemExit(code)
    globals()[program](directory, words)


if __name__ == "__main__":
    main()
