"""`make test-all`: the tests on every supported Python, with the lowest and with the pinned versions of the packages.

Each environment takes about 5 GB. It is created under `.venv-all/`, tested and removed. The number of passed tests, the
failed tests, and the reasons for skipped tests are added to benchmarks/results/versions.json, from which
docs/versions.md is written. This module needs only the standard library.
`make test-all ARGS="--only 3.12-lowest --quick"` runs a selection.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".venv-all"
RESULTS = Path(__file__).parent / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"

PYTHONS = ("3.11", "3.12", "3.13")
PACKAGES = {
    "lowest": "the lower bounds in `pyproject.toml`",
    "pinned": "the versions in `constraints.txt`",
}
"""The versions of the packages with which each Python is tested."""

QUICK = (
    *("config", "models", "system", "tracking", "parallel/test_ddp.py", "parallel/test_fsdp.py", "test_device.py"),
    *("parallel/pipelining/test_process_engine.py", "parallel/test_compiling.py", "parallel/test_full_state.py"),
    *(
        "storage/test_safe_torch_load.py",
        "storage/test_content_checks.py",
        "data/test_workers.py",
        "data/test_decode.py",
    ),
    *("test_optimizer.py", "test_packaging.py", "test_parity.py", "test_precision.py", "test_seeds.py"),
    *("workloads/test_classifier.py", "env"),
)
"""Files and folders of tests/ that `--quick` runs: those that depend most on the versions of Python and torch."""

SHOWN = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "gymnasium", "tensorboard", "scikit-learn")
"""The packages whose versions the table shows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Test each chosen environment, write the table after each, and return 1 if any of them failed."""
    names = [f"{python}-{packages}" for python in PYTHONS for packages in PACKAGES]
    parser = argparse.ArgumentParser("make test-all", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="only these files and folders of tests/")
    parser.add_argument("--keep", action="store_true", help="keep the environments, 5 GB each")
    parser.add_argument("--processes", type=int, default=3, help="test processes at once; %(default)s by default")
    options = parser.parse_args(arguments)
    failed = []
    for name in options.only:
        row = tested(name, options)
        passed = not row["errors"] and not row["failed"] and not row.get("stopped_early")
        failed += [] if passed else [name]
        print(f"{name}: {_summary(row)}", flush=True)
        record(name, row)
    print(f"the table is {PAGE.relative_to(ROOT)}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def tested(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Set up the environment `name`, run the tests in it, and return the results as plain values."""
    version, _, packages = name.partition("-")
    selected = options.tests or (list(QUICK) if options.quick else [])
    row = {"date": time.strftime("%Y-%m-%d"), "tests": selected, "versions": {}, "errors": [], "minutes": 0.0}
    row |= {"passed": 0, "failed": [], "skipped": {}, "machine": f"{platform.system()} {platform.machine()}"}
    interpreter = find_python(version)
    if interpreter is None:
        return row | {"errors": [f"there is no python{version} on this machine"]}
    directory = ENVIRONMENTS / name
    try:
        print(f"{name}: setting up {directory.relative_to(ROOT)} ({PACKAGES[packages]})", flush=True)
        constraints = write_constraints(packages, ENVIRONMENTS / f"{name}.txt")
        if (problem := set_up(directory, interpreter, constraints)) is not None:
            return row | {"errors": [problem]}
        begin = time.monotonic()
        row["versions"] = {"python": version_of(directory), **installed(directory)}
        row |= run_tests(directory, constraints, selected, options.processes, ENVIRONMENTS / f"{name}.xml")
        return row | {"minutes": round((time.monotonic() - begin) / 60, 1)}
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)


def find_python(version: str) -> Path | None:
    """Return an interpreter of `version`, such as `3.12`, from pyenv or PATH; None if there is none that works."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    found = [*sorted(of_pyenv.glob(f"{version}.*/bin/python")), *([Path(on_path)] if on_path else [])]
    for path in found:
        code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return path
    return None


def write_constraints(packages: str, path: Path) -> Path:
    """Return the path of the file with the constraints of an environment.

    Args:
        packages: `pinned` or `lowest`. For `pinned`, the file is constraints.txt. For `lowest`, the lower bounds in
            pyproject.toml are written to `path`, and `path` is returned.
        path: the file to write for `lowest`.
    """
    if packages == "pinned":
        return ROOT / "constraints.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lower_bounds()), encoding="utf-8")
    return path


def lower_bounds() -> list[str]:
    """Return the constraints that pin each package to its lower bound in pyproject.toml, such as `torch==2.11`.

    The packages are the dependencies and those of the extra `test`. Packages without a lower bound are left out.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    found = (re.match(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)", line) for line in lines)
    return [f"{match[1]}=={match[2]}" for match in found if match]


def set_up(directory: Path, interpreter: Path, constraints: Path) -> str | None:
    """Create the environment in `directory`, and return an error message, or None on success."""
    shutil.rmtree(directory, ignore_errors=True)
    python = directory / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--prefer-binary"]
    for command in (
        [interpreter, "-m", "venv", directory],
        [*pip, "-c", constraints, "-e", f"{ROOT}[test]"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return " ".join(lines or done.stderr.splitlines()[-3:])
    return None


def version_of(directory: Path) -> str:
    """Return the version of the environment's Python, such as `3.12.1`."""
    command = [directory / "bin" / "python", "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def installed(directory: Path) -> dict[str, str]:
    """Return the versions of the packages in `SHOWN` that are installed in an environment."""
    command = [directory / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    versions = {each["name"]: each["version"] for each in listed}
    return {name: versions[name] for name in SHOWN if name in versions}


def run_tests(
    directory: Path, constraints: Path, selected: Sequence[str], processes: int, report: Path
) -> dict[str, Any]:
    """Run the tests in the environment, and return what passed, failed and was skipped.

    Args:
        directory: the environment.
        constraints: the constraints with which it was set up.
        selected: files and folders of tests/; all of them if it is empty.
        processes: the number of test processes.
        report: where pytest writes its report as JUnit XML.
    """
    report.unlink(missing_ok=True)
    command = [directory / "bin" / "python", "-m", "pytest", f"--numprocesses={processes}", "--dist=loadfile"]
    command += ["--no-loadscope-reorder", f"--junitxml={report}", *(f"tests/{each}" for each in selected)]
    variables = {**os.environ, "RUNNER_CONSTRAINTS": str(constraints)}
    done = subprocess.run(command, cwd=ROOT, env=variables, check=False)
    if not report.exists():
        return {"errors": [f"pytest ended with exit code {done.returncode} and wrote no report"]}
    return read_report(report) | {"stopped_early": done.returncode not in (0, 1)}


def read_report(report: Path) -> dict[str, Any]:
    """Read a JUnit XML report, and return the results of the tests.

    Returns:
        A dict with the keys `passed` (the number of passed tests), `failed` (the sorted names of the failed tests) and
        `skipped` (a dict from each reason for skipping tests to the number of tests skipped for this reason).
    """
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            skipped[skip.get("message", "")] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": dict(sorted(skipped.items()))}


def record(name: str, row: dict[str, Any]) -> None:
    """Add or replace the row of the environment `name` in the results, and rewrite docs/versions.md from all rows."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = dict(sorted({**rows, name: row}.items()))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the text of docs/versions.md.

    Args:
        rows: the results of each environment, by its name.
    """
    lines = [_HEAD, "", "| Environment | Versions | Passed | Failed | Skipped | Minutes | Date |", f"|{'---|' * 7}"]
    for name in (f"{python}-{packages}" for python in PYTHONS for packages in PACKAGES):
        row = rows.get(name)
        if row is None:
            lines.append(f"| {name} | | *not run* | | | | |")
            continue
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        selection = " of a selection" if row["tests"] else ""
        selection += ", stopped before the end" if row.get("stopped_early") else ""
        counts = f"{row['passed']:,}{selection} | {len(row['failed'])} | {sum(row['skipped'].values())}"
        result = "*not run* | | " if row["errors"] else counts
        lines.append(f"| {name} | {versions} | {result} | {row['minutes']} | {row['date']} |")
    lines += ["", *_reasons(rows), *_selections(rows)]
    return "\n".join(lines).rstrip() + "\n"


_HEAD = """# Versions

`make test-all` runs the tests of `make test` in an environment of its own for each supported Python, once with
`lowest`, the lower bounds in `pyproject.toml`, and once with `pinned`, those in `constraints.txt`. It writes this
page. `make test-all ARGS="--only 3.12-lowest --quick"` runs a selection. An environment takes 5 GB while it is tested.

- Hydra 1.3 does not run on Python 3.14.
- torch 2.15 is not among the supported versions until there is a torchvision for it."""


def _reasons(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines that say which tests failed, which were skipped, and what was not run, with the reasons."""
    lines = []
    for title, key in (("Not run", "errors"), ("Failed", "failed")):
        found = [f"- {name}: {each}" for name, row in rows.items() for each in row[key]]
        lines += [f"## {title}", "", *found, ""] if found else []
    reasons: dict[str, dict[str, int]] = {}
    for name, row in rows.items():
        for reason, count in row["skipped"].items():
            reasons.setdefault(" ".join(reason.split()), {})[name] = count
    if reasons:
        lines += ["## Skipped, and why", "", "| Reason | Tests |", "|---|---|"]
        for reason, counts in sorted(reasons.items()):
            same = set(counts.values()) if counts.keys() == rows.keys() else set()
            where = ", ".join(f"{count} in {name}" for name, count in counts.items())
            lines.append(f"| {reason.replace('|', '/')} | {f'{same.pop()} everywhere' if len(same) == 1 else where} |")
        lines += [
            "",
            "Tests marked `slow`, `gpu` and `netns` are not part of `make test`, and were not run either.",
            "",
        ]
    return lines


def _selections(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines that list the selected tests of each environment that was tested with only a selection."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows.items():
        names.setdefault(tuple(row["tests"]), []).append(name)
    lines = [
        f"- {', '.join(where)}: {', '.join(f'`tests/{each}`' for each in selected)}"
        for selected, where in names.items()
        if selected
    ]
    return ["## Selections", "", *lines] if lines else []


def _summary(row: dict[str, Any]) -> str:
    if row["errors"]:
        return "; ".join(row["errors"])
    skipped = sum(row["skipped"].values())
    return f"{row['passed']} passed, {len(row['failed'])} failed, {skipped} skipped in {row['minutes']} minutes"


if __name__ == "__main__":
    sys.exit(main())
