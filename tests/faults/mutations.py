"""Mutation testing: plants one bug at a time in a copy of the project, and checks that a test fails.

`python tests/faults/mutations.py [WORD…]` tries the bugs whose description contains a WORD, or all. If no test notices
a bug, a test is missing. The bugs are in mutations.txt: a description, the tests of which one must fail, a text that
occurs exactly once in the package, in any file (`-`), and the text that replaces it (`+`).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
COPIED = ("runner", "models", "conf", "tests", "pyproject.toml", "constraints.txt", "Makefile")
TIMEOUT_SECONDS = 900.0
"""Timeout of a test run in seconds. A bug that makes the tests hang counts as noticed."""


class Mutation(NamedTuple):
    bug: str
    tests: list[str]
    old: str
    new: str


def read_mutations() -> list[Mutation]:
    found = []
    for block in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").rstrip("\n").split("\n\n"):
        bug, *lines = block.split("\n")
        tests, old, new = ([line[len(mark) :] for line in lines if line.startswith(mark)] for mark in ("by ", "-", "+"))
        found.append(Mutation(bug, tests, "\n".join(old), "\n".join(new)))
    return found


def first_failure(project: Path, test: str, faults: str) -> str:
    """Run a test or a file, with RUNNER_FAULTS=`faults`, and return the first test that failed; empty if none did."""
    path = os.pathsep.join([str(project), str(project / "tests")])
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "RUNNER_FAULTS": faults}
    where = [sys.executable, "-c", "import runner; print(runner.__file__)"]
    found = subprocess.run(where, cwd=project, env=variables, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(project), f"the copy is not what is tested, but {found}"
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", test]
    try:
        done = subprocess.run(
            words, cwd=project, env=variables, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{test}, which hangs"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"{test}, which ends pytest itself with {done.returncode}"


def try_out(mutation: Mutation) -> str:
    """Plant a bug in a copy of the project, and return the first test that notices it; empty if none does."""
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, project / name)
        texts = {file: file.read_text(encoding="utf-8") for file in (project / "runner").rglob("*.py")}
        [file] = [file for file, text in texts.items() for _ in range(text.count(mutation.old))]
        file.write_text(texts[file].replace(mutation.old, mutation.new), encoding="utf-8")
        for faults in ("", "all"):
            for test in mutation.tests:
                if failed := first_failure(project, test, faults):
                    return f"{file.relative_to(project)}: {failed}" + ", in `make faults`" * bool(faults)
    return ""


def main(words: list[str]) -> int:
    """Try the bugs whose description contains one of `words`, or all; return 0 if the tests noticed each, else 1."""
    chosen = [mutation for mutation in read_mutations() if not words or any(word in mutation.bug for word in words)]
    noticed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutation, failed in zip(chosen, pool.map(try_out, chosen), strict=True):
            print(f"{mutation.bug}: {failed or 'NOT NOTICED'}", flush=True)
            noticed += bool(failed)
    print(f"{noticed} of {len(chosen)} are noticed")
    return int(noticed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
