"""`make test-all`: the tests on every supported version, and with the instruction sets of older CPUs.

`nox -s "tests-3.12(lowest)" -- tests/config` runs a selection; `nox -l` lists the environments, of 5 GB each.
"""

import re
import tomllib
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
SELECTED = ["--numprocesses=4", "--dist=loadfile", "--no-loadscope-reorder"]
INSTRUCTION_SETS = {"ONEDNN_MAX_CPU_ISA": ["SSE41", "AVX2"], "ATEN_CPU_CAPABILITY": ["default", "avx2"]}
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
    session.run("pytest", *(session.posargs or SELECTED), env={"RUNNER_CONSTRAINTS": str(constraints)})


@nox.session
def instruction_sets(session: nox.Session) -> None:
    """No expected value depends on the CPU: the libraries use no more than these instructions."""
    session.install("-c", "constraints.txt", "-e", ".[test]")
    for variable, values in INSTRUCTION_SETS.items():
        for value in values:
            # A cache of its own: torch takes what its compiler has made for other instructions.
            cache = str(Path(session.create_tmp(), f"{variable}={value}"))
            session.run(
                "pytest", *(session.posargs or SELECTED), env={variable: value, "TORCHINDUCTOR_CACHE_DIR": cache}
            )
