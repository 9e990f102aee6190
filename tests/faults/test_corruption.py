"""Tests with damaged files: a run resumes from its intact files with the same results, or is refused with an error."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoint_edits import rewrite_manifest
from helpers.compose import TINY_CPU, build_composed_run
from helpers.dry_run import run_up_to_training
from helpers.events import MEASURED, scalar_curves
from helpers.fault_checks import assert_one_value_per_step
from helpers.faults import RUN_ALL_FAULTS as ALL
from helpers.runs import assert_bitwise_equal, run_outcome

from runner.analysis.comparison import Comparison
from runner.api.run_job import run_one
from runner.run import build_run
from runner.storage.checkpoint import Checkpoint, load
from runner.storage.saved_run import config_text, saved_config

OPTIONS = (*TINY_CPU, "data.crop=2", "model.dropout=0.2", "optimizer=adamw", "steps=8", "save_every=2", "eval_every=4")
OPTIONS += ("log_every=3", "keep=9", "name=a")
TOP = ("config.yaml", "overrides.yaml", "environment.json", "result.json", "log.txt", ".lock", "events")
CHECKPOINT = ("config.yaml", "manifest.json", "model.safetensors", "state.pt", "rank_0.pt", "rank_1.pt")
FILES = [*TOP, *(f"checkpoints/step_0000000{step}/{name}" for step in (2, 4) for name in CHECKPOINT)]

Damage = Callable[[bytes, random.Random], bytes]


def flipped(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def zeroed(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data)) // 512 * 512
    return data[:start] + bytes(min(512, len(data) - start)) + data[start + 512 :]


def ended_after_a_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: draw.randrange(len(lines))])


DAMAGE: dict[str, Damage] = {
    **{f"bit flip {number}": flipped for number in range(12)},
    **{f"zeroed block {number}": zeroed for number in range(4)},
    **{f"truncated {number}": lambda data, draw: data[: draw.randrange(1, len(data))] for number in range(4)},
    "without its last byte": lambda data, draw: data[:-1],
    "emptied": lambda data, draw: b"",
    "all zeros": lambda data, draw: bytes(len(data)),
    "appended zeros": lambda data, draw: data + bytes(512),
    "appended text": lambda data, draw: data + b"\nsteps: 5\n",
    "appended bytes": lambda data, draw: data + draw.randbytes(100),
    "twice": lambda data, draw: data + data,
    **{f"ended after a line {number}": ended_after_a_line for number in range(4)},
    "other bytes": lambda data, draw: draw.randbytes(len(data)),
    "half of another": lambda data, draw: data[: len(data) // 2] + draw.randbytes(len(data) // 2),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The directory of a run that is done."""
    root = tmp_path_factory.mktemp("whole")
    run_one(build_composed_run(*OPTIONS, f"output_root={root}/outputs"), ["steps=8"])
    [path] = root.glob("outputs/a/*")
    return path


@pytest.fixture(scope="module")
def wanted(whole: Path) -> dict[int, Checkpoint]:
    return {step: load(whole / f"checkpoints/step_0000000{step}") for step in (2, 4, 6, 8)}


def copied(whole: Path, to: Path, until: int = 4) -> Path:
    """Copy the run, as if it had crashed after step `until` and rank 1 had saved the same state as rank 0."""
    path = Path(shutil.copytree(whole, to / "outputs/a" / whole.name))
    for step in range(until + 2, 10, 2):
        shutil.rmtree(path / f"checkpoints/step_0000000{step}")
    for checkpoint in path.glob("checkpoints/step_*"):
        shutil.copy(checkpoint / "rank_0.pt", checkpoint / "rank_1.pt")
        rewrite_manifest(checkpoint, world_size=2)
    if until < 8:
        result = json.loads((path / "result.json").read_text())
        (path / "result.json").write_text(json.dumps(result | {"status": "crashed", "steps": until}))
    return path


def file_of(path: Path, name: str) -> Path:
    return next(path.glob("events.out.*")) if name == "events" else path / name


def assert_resumed_or_refused(path: Path, cwd: Path, wanted: dict[int, Checkpoint], auto: bool) -> str:
    """Resume the run, check the error or the checkpoint, and return `refused`, `done` or `from step N`."""
    typed = [*OPTIONS, f"output_root={cwd}/outputs", "resume=auto"] if auto else [f"resume={path}"]
    found = run_up_to_training(*typed, cwd=cwd)
    assert "Traceback" not in found.console, found.console
    if found.code == 2:
        lines = found.console.splitlines()
        assert 1 < len(lines) <= 10, found.console
        assert any(line.startswith(("resume: got ", "output_root: got ")) for line in lines), found.console
        assert "it is another run" not in found.console
        return "refused"
    assert found.directory == path, "it begins anew"
    if found.result is not None:
        return "done"
    assert found.checkpoint is not None, "it begins anew"
    assert found.checkpoint.step in (2, 4), found.console
    for part in ("tensors", "state", "local"):
        assert_bitwise_equal(getattr(found.checkpoint, part), getattr(wanted[found.checkpoint.step], part), part)
    return f"from step {found.checkpoint.step}"


@pytest.mark.parametrize("file", FILES)
def test_damage_to_one_file_changes_no_value(file, whole, wanted, tmp_path):
    every = list(enumerate(DAMAGE, FILES.index(file)))
    few = [*random.Random(file).sample(every, 1), *(each for each in every if each == (28, "ended after a line 1"))]
    for number, kind in every if ALL else few:
        cwd = tmp_path / str(number)
        path = copied(whole, cwd)
        damaged = file_of(path, file)
        data = damaged.read_bytes() or b"1\n"  # .lock is empty
        damaged.write_bytes(DAMAGE[kind](data, random.Random(number)))
        assert len(Comparison([cwd]).runs) == 1, "runner compare reads damaged runs"
        ended = assert_resumed_or_refused(path, cwd, wanted, auto=number % 2 == 0)
        if "step_00000004" in file:
            assert ended == "from step 2", (kind, ended)
            assert (path / "checkpoints/step_00000004.corrupt").is_dir()
        else:
            assert ended == "from step 4", (kind, ended)
        shutil.rmtree(cwd)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if ALL or kind in ("bit flip 2", "emptied", "appended text")])
def test_resume_with_a_damaged_event_file_adds_no_duplicate_or_wrong_points(kind, whole, tmp_path):
    path = copied(whole, tmp_path)
    events = file_of(path, "events")
    events.write_bytes(DAMAGE[kind](events.read_bytes(), random.Random(kind)))
    values = saved_config(path).values | {"resume": str(path)}
    assert run_one(build_run(values), [f"resume={path}"]).steps == 8
    assert_one_value_per_step(path)
    wanted = scalar_curves(whole)
    for tag, points in scalar_curves(path, without=MEASURED).items():
        assert set(points) <= set(wanted[tag]), tag
        assert {point for point in wanted[tag] if point[0] > 4} <= set(points), tag


SWAPS = [
    ("checkpoints/step_00000002", "checkpoints/step_00000004", "refused"),
    ("checkpoints/step_00000002/state.pt", "checkpoints/step_00000004/state.pt", "refused"),
    ("checkpoints/step_00000002/rank_0.pt", "checkpoints/step_00000004/rank_0.pt", "refused"),
    ("checkpoints/step_00000002/model.safetensors", "checkpoints/step_00000004/model.safetensors", "refused"),
    ("checkpoints/step_00000002/manifest.json", "checkpoints/step_00000004/manifest.json", "refused"),
    ("checkpoints/step_00000004/model.safetensors", "checkpoints/step_00000004/state.pt", "from step 2"),
    ("checkpoints/step_00000004/rank_0.pt", "checkpoints/step_00000004/state.pt", "from step 2"),
    ("checkpoints/step_00000004/manifest.json", "checkpoints/step_00000004/config.yaml", "from step 2"),
    ("config.yaml", "overrides.yaml", "from step 4"),
    ("config.yaml", "result.json", "from step 4"),
    ("environment.json", "result.json", "from step 4"),
    ("config.yaml", "checkpoints/step_00000004/model.safetensors", "from step 2"),
    ("log.txt", "events", "from step 4"),
]


@pytest.mark.parametrize(("one", "other", "ended"), SWAPS)
def test_swapped_files_are_noticed(one, other, ended, whole, wanted, tmp_path):
    for auto in (False, True) if ALL else (len(one) % 2 == 0,):
        path = copied(whole, tmp_path / str(auto))
        first, second = file_of(path, one), file_of(path, other)
        first.rename(path / "aside")
        second.rename(first)
        (path / "aside").rename(second)
        assert assert_resumed_or_refused(path, tmp_path / str(auto), wanted, auto) == ended


def test_the_config_of_another_run_is_noticed(whole, tmp_path):
    """An intact config or checkpoint that belongs to another run is refused, and the error names the differing key."""
    path, other = copied(whole, tmp_path), config_text(saved_config(whole).values | {"seed": 1})
    (path / "config.yaml").write_text(other)
    found = run_up_to_training(f"resume={path}", cwd=tmp_path)
    assert (found.code, "seed" in found.console) == (2, True), found.console
    shutil.copy(whole / "config.yaml", path)
    (path / "checkpoints/step_00000004/config.yaml").write_text(other)
    rewrite_manifest(path / "checkpoints/step_00000004")
    found = run_up_to_training(f"resume={path}", cwd=tmp_path)
    assert (found.code, "seed" in found.console) == (2, True), found.console


@pytest.mark.parametrize("kind", DAMAGE if ALL else ["bit flip 0", "truncated 1"])
@pytest.mark.parametrize("file", ["result.json", "checkpoints/step_00000008/state.pt"])
def test_a_damaged_completed_run_stays_done_or_repeats_its_last_steps(kind, file, whole, wanted, tmp_path):
    path = copied(whole, tmp_path, until=8)
    damaged = path / file
    damaged.write_bytes(DAMAGE[kind](damaged.read_bytes(), random.Random(kind)))
    found = run_up_to_training(f"resume={path}", cwd=tmp_path)
    assert "Traceback" not in found.console, found.console
    if found.code == 2:
        return
    if found.result is None:
        assert found.checkpoint is not None
        step = 8 if file == "result.json" else 6
        assert found.checkpoint.step == step
        assert_bitwise_equal(found.checkpoint.tensors, wanted[step].tensors)


@pytest.mark.parametrize("file", FILES if ALL else ["config.yaml", "events", "checkpoints/step_00000004/state.pt"])
def test_a_damaged_run_that_is_resumed_ends_like_the_undisturbed_one(file, whole, tmp_path):
    path = copied(whole, tmp_path)
    data: Any = file_of(path, file).read_bytes()
    if file != "events":  # if it were truncated, points of the curves would be lost
        file_of(path, file).write_bytes(data[: len(data) // 2])
    values = saved_config(path).values | {"resume": str(path)}
    assert run_one(build_run(values), [f"resume={path}"]).status == "done"
    assert_bitwise_equal(run_outcome(path), run_outcome(whole))
