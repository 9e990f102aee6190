"""A fake of `python -m runner` that starts quickly, for tests of engines: `python -S fake_run.py WORD …`.

It prints a line of JSON with its process IDs, its directory, some environment variables, and whether it is resumed, and
exits with the code of `exit=N`; with `until=FILE`, once FILE exists; on SIGTERM, with 75. Then, it writes the file of
`saved=FILE`: if this exists at the start, it is resumed, and waits for nothing. `with_child` starts a child process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPORTED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def main() -> None:
    words = dict(word.partition("=")[::2] for word in sys.argv[1:])
    saved = Path(words["saved"]) if "saved" in words else None
    is_resumed = saved is not None and saved.exists()

    def save(*_: object) -> None:
        if saved is not None:
            saved.write_text("saved")
        os._exit(75)

    signal.signal(signal.SIGTERM, save)
    child = subprocess.Popen(["sleep", "600"]) if "with_child" in words else None
    seen = {name: os.environ.get(name) for name in REPORTED_VARIABLES} | {"cwd": os.getcwd(), "resumed": is_resumed}
    processes = {"pid": os.getpid(), "parent": os.getppid(), "child": child and child.pid}
    print(json.dumps(seen | processes), flush=True)
    while "until" in words and not is_resumed and not Path(words["until"]).exists():
        time.sleep(0.02)
    raise SystemExit(int(words.get("exit", "0")))


if __name__ == "__main__":
    main()
