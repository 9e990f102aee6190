"""`make test-all`: the tests on every supported version.

`nox -s "tests-3.12(lowest)" -- tests/config` runs a selection; `nox -l` lists the environments, of 5 GB each.
"""

import re
import tomllib
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
NEXT = {"hydra-core": "==1.4.0rc3", "omegaconf": "==2.4.1rc1"}


def lower_bounds() -> list[str]:
    """Return a pin of each dependency, those of the extra `test` included, to its lower bound: `torch==2.11`."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    found = (re.match(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)", line) for line in lines)
    return [f"{match[1]}=={match[2]}" for match in found if match]


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("versions", ["lowest", "pinned", "next"], ids=["lowest", "pinned", "next"])
def tests(session: nox.Session, versions: str) -> None:
    constraints = Path("constraints.txt").resolve()
    if versions != "pinned":
        pins = lower_bounds()
        if versions == "next":
            pinned = re.findall(r"^([\w.-]+)==(.+)$", constraints.read_text(encoding="utf-8"), re.MULTILINE)
            pins = [f"{name}{NEXT.get(name, f'=={version}')}" for name, version in pinned]
        constraints = Path(session.create_tmp()) / "constraints.txt"
        constraints.write_text("\n".join(pins), encoding="utf-8")
    session.install("--prefer-binary", "-c", str(constraints), "-e", ".[test]")
    selected = session.posargs or ["--numprocesses=4", "--dist=loadfile", "--no-loadscope-reorder"]
    session.run("pytest", *selected, env={"RUNNER_CONSTRAINTS": str(constraints)})
