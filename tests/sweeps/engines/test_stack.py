"""Tests of `sweep.stack`: what runs that are computed together compute, write and survive."""

import json
import os
import re
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from helpers.command import ROOT, Command, glob, processes_in, run_command, wait_until
from helpers.compose import TINY_CPU
from helpers.dry_run import run_in_this_process
from helpers.events import MEASURED, scalar_curves
from helpers.plain_loop import largest_difference
from helpers.runs import newest_checkpoint

from runner.config.composition import Composer
from runner.config.overrides import quoted
from runner.config.user_code import UserCode, using
from runner.sweeps.sweep_jobs import Planner, SweepJobs

FILES = ROOT / "tests" / "helpers" / "stacks"
TASK = f"workload={FILES / 'strange.py'}"
DOUBLE = ("device=cpu", "device.threads=1", "precision=64", "log_every=2", "sweep.slots=1")
FEW = ("steps=9", "eval_every=4", "save_every=4")
AGENT = (
    *("workload=dqn", "env.num_envs=2", "model.hidden=[8]", "workload.env_steps=260", "workload.warm_up=60"),
    *("workload.eval_episodes=2", "eval_every=20", "save_every=20", "batch_size=16"),
)
LANGUAGE = (
    "workload=language",
    "model=gpt_tiny",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "data.context=16",
    f"data.file={ROOT / 'LICENSE'}",
    "data.holdout=0.1",
)
SWEEPS: dict[str, tuple[str, ...]] = {
    "images, with everything in the update": (
        *(
            "model=convnet",
            "data.size=16",
            "batch_size=16",
            "accumulation=2",
            "max_grad_norm=0.5",
            "ema.decay=0.5",
            *FEW,
        ),
        *("optimizer=sgd", "optimizer.lr=0.1,0.01", "schedule=cosine", "seed=0,1"),
    ),
    "a strange network of the user's": (
        *(TASK, "batch_size=8", *FEW, "optimizer=adamw,sgd", "optimizer.lr=0.01", "optimizer.weight_decay=0,0.1"),
    ),
    "agents": (*AGENT, "workload.discount=0.9,0.99", "workload.epsilon_final=0.1,0.3"),
    "language models": (*LANGUAGE, "batch_size=2", *FEW, "seed=0,1", "optimizer.lr=0.003"),
}


def sweep(path: Path, stack: int, *words: str, code: int = 0) -> tuple[list[Path], str]:
    """Run a sweep below `path`; return the directories of its runs, and what it printed."""
    found, console = run_command("-m", *DOUBLE, f"sweep.stack={stack}", *words, cwd=path)
    assert found == code, console
    return sorted(each for each in path.glob("outputs/sweeps/*/*/0*") if each.is_dir()), console


def alone(path: Path, stacked: list[Path], own_process: bool = False) -> list[Path]:
    """Train each of the runs, in this process or one of its own; return their directories below `path`."""
    path.mkdir(exist_ok=True)
    for run in stacked:
        typed = [*yaml.safe_load((run / "overrides.yaml").read_text()), f"--run-directory={path / run.name}"]
        with using(UserCode()):
            code, console = run_command(*typed, cwd=path) if own_process else run_in_this_process(typed, path)
        assert code == 0, console
    return [path / run.name for run in stacked]


def outcome(run: Path) -> dict[str, Any]:
    """What a run has left behind, without times: by name, tensors and plain values."""
    newest = newest_checkpoint(run)
    state, local = (torch.load(newest / name, weights_only=True) for name in ("state.pt", "rank_0.pt"))
    result = json.loads((run / "result.json").read_text())
    return {
        "weights": safetensors.torch.load_file(newest / "model.safetensors"),
        "moments": {f"{n} {k}": t for n, each in state["optimizer"].items() for k, t in each.items()},
        "random": local["random"],
        "curves": scalar_curves(run, without=MEASURED),
        "result": {key: result[key] for key in ("status", "steps", "metrics", "best", "config_hash", "error")},
        "files": sorted(str(each.relative_to(run)) for each in run.rglob("*") if "tfevents" not in each.name),
    }


def assert_same_runs(ours: list[Path], theirs: list[Path]) -> None:
    assert [each.name for each in ours] == [each.name for each in theirs]
    for our, their in zip(map(outcome, ours), map(outcome, theirs), strict=True):
        for kind in ("weights", "moments"):
            assert largest_difference(our[kind], their[kind]) < 1e-12
        assert our["random"].keys() == their["random"].keys()
        assert all(torch.equal(our["random"][name], their["random"][name]) for name in our["random"])
        assert our["files"] == their["files"]
        assert our["curves"].keys() == their["curves"].keys()
        for tag, points in our["curves"].items():
            assert points == [(step, pytest.approx(value, 1e-6, 1e-7)) for step, value in their["curves"][tag]], tag
        metrics, wanted = our["result"].pop("metrics"), their["result"].pop("metrics")
        assert metrics == pytest.approx(wanted, rel=1e-9)
        for each in (our, their):
            each["result"]["best"].pop("value")
        assert our["result"] == their["result"]


@pytest.mark.parametrize("words", SWEEPS.values(), ids=SWEEPS.keys())
def test_runs_in_a_stack_are_as_if_alone(words, tmp_path):
    stacked, console = sweep(tmp_path / "stacked", 8, *words)
    assert f"{len(stacked)} together" in console
    logs = [(each / "log.txt").read_text() for each in stacked]
    assert all("together with other runs" in each for each in logs)
    assert [line for each in logs for line in each.splitlines() if "one by one" in line] == []
    assert_same_runs(stacked, alone(tmp_path / "alone", stacked))


ONE_BY_ONE = {
    "counter.py": "a pass changes calls, which",
    "loss.py": "a pass changes seen, which",
    "list.py": "a pass changes means, which",
    "kept.py": "a pass changes activations, which",
    "drawn.py": "a pass draws from random, and",
    "hook.py": "layer has hooks, which",
    "reads_a_value.py": "torch.func.vmap cannot take",
    "out_of_memory.py": "there is not enough memory for 2 at once",
}
"""What the log says of a file whose passes are not stacked."""
ALONE = {
    "with_hook.py": "after_step() may change anything of a run",
    "with_global.py": "scale in with_global.py would be",
}
"""What the sweep says of a file of which each run has a process."""


def test_code_that_cannot_be_stacked_is_computed_run_by_run_as_if_alone_and_the_reason_is_said(tmp_path):
    files = {**ONE_BY_ONE, **ALONE}
    words = (f"workload={','.join(str(FILES / file) for file in files)}", "batch_size=8", *FEW, "seed=0,1")
    runs, console = sweep(tmp_path / "stacked", 3, *words)
    assert len(runs) == 2 * len(files)
    assert console.count(", 2 together") == 2 * len(ONE_BY_ONE)
    assert all(f"sweep.stack=3: jobs are computed one by one, as {why}" in console for why in ALONE.values())
    for number, why in enumerate(ONE_BY_ONE.values()):
        for run in runs[2 * number : 2 * number + 2]:
            assert re.search(f"one by one: .*{re.escape(why)}", (run / "log.txt").read_text()), run
    refused = FILES / "reads_a_value.py"
    [line] = [i for i, text in enumerate(refused.read_text().splitlines(), start=1) if "# this line" in text]
    log = (runs[2 * [*files].index(refused.name)] / "log.txt").read_text()
    for what in ("training", "evaluations"):
        assert f"{what}: the runs of the stack are computed one by one: torch.func.vmap cannot take" in log
    assert f"{refused}, line {line}: " in log
    count = 2 * len(ONE_BY_ONE)
    assert_same_runs(runs[:count], alone(tmp_path / "alone", runs[:count]))
    assert_same_runs(runs[count:], alone(tmp_path / "alone", runs[count:], own_process=True))


def test_accumulation_of_own_code_is_proved_and_computed_together(tmp_path):
    words = (f"workload={FILES / 'plain.py'}", "batch_size=8", *FEW, "accumulation=2", "seed=0,1")
    stacked, console = sweep(tmp_path / "stacked", 3, *words)
    assert "2 together" in console
    logs = [(each / "log.txt").read_text() for each in stacked]
    assert all("proof: the first step is that of a single device" in each and "one by one" not in each for each in logs)
    assert_same_runs(stacked, alone(tmp_path / "alone", stacked))


def test_runs_that_diverge_or_are_refused_end_alone(tmp_path):
    words = (*TINY_CPU, "batch_size=32", "steps=60", "optimizer.weight_decay=1000")  # multiplies weights by 1 - 1000 lr
    stacked, console = sweep(tmp_path / "stacked", 4, *words, "optimizer.lr=0.001,900,2000,0.0005", code=3)
    assert "2 of 4 jobs done, 1 refused, 1 diverged" in console
    assert "optimizer.lr: got 2000" in console
    done = [each for each in stacked if json.loads((each / "result.json").read_text())["status"] == "done"]
    assert (len(stacked), len(done)) == (3, 2)
    for our, their in zip(done, alone(tmp_path / "alone", done), strict=True):
        assert largest_difference(outcome(our)["weights"], outcome(their)["weights"]) < 1e-12


def test_a_stack_that_is_stopped_and_later_killed_goes_on_as_a_stack(tmp_path):
    words = (*SWEEPS["a strange network of the user's"], "steps=30", "eval_every=15", "save_every=4")

    def start(gate: str) -> Command:
        typed = ("-m", *DOUBLE, "sweep.stack=4", *words, "resume=auto")
        return Command(tmp_path / "broken", *typed, STEP_GATE=gate)

    for saved, gate, sent in ((8, "10:never", signal.SIGTERM), (20, "22:never", signal.SIGKILL)):
        command = start(gate)
        pattern = f"outputs/sweeps/*/*/0*/checkpoints/step_{saved:08d}"
        wait_until(partial(lambda cwd, pattern: len(glob(cwd, pattern)) == 4, command.cwd, pattern))
        for pid in processes_in(command.cwd) if sent == signal.SIGKILL else [command.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, sent)
        assert command.wait_for_all_processes()[0] == (75 if sent == signal.SIGTERM else -9)
    command = start("")
    code, console = command.wait()
    assert code == 0, console
    assert "4 together" in console
    runs = sorted(each for each in command.cwd.glob("outputs/sweeps/*/*/0*") if each.is_dir())
    for each in runs:
        resumed = [int(step) for step in re.findall(r"resumed after step (\d+)", (each / "log.txt").read_text())]
        assert resumed[0] in (9, 10)
        assert resumed[1] == 20
    unbroken, _ = sweep(tmp_path / "unbroken", 4, *words)
    for our, their in zip(map(outcome, runs), map(outcome, unbroken), strict=True):
        assert largest_difference(our["weights"], their["weights"]) < 1e-12
        assert all(torch.equal(our["random"][name], their["random"][name]) for name in our["random"])


def test_a_run_of_a_stack_resumes_alone_in_another_mode(tmp_path):
    words = (*TINY_CPU, "precision=64", "batch_size=8", "optimizer=adamw", "schedule=constant")
    stacked, _ = sweep(tmp_path / "stacked", 2, *words, "steps=8", "seed=0,1")
    for cwd, run in ((tmp_path / "stacked", stacked[1]), (tmp_path / "alone", None)):
        start = (f"resume={run}", "parallel=ddp", "parallel.processes=2")
        single = (*words, "log_every=2", "seed=1", f"--run-directory={tmp_path / 'one'}")
        code, console = run_command(*(start if run else single), "steps=12", cwd=cwd)
        assert code == 0, console
    ours, theirs = outcome(stacked[1]), outcome(tmp_path / "one")
    assert largest_difference(ours["weights"], theirs["weights"]) < 1e-12


def test_what_ends_the_process_of_a_stack_is_said_for_each_run(tmp_path):
    words = (f"workload={FILES / 'exits.py'}", "batch_size=8", *FEW, "seed=0,1")
    _, console = sweep(tmp_path, 2, *words, code=1)
    for number in (0, 1):
        assert f"job {number}: seed={number}: crashed" in console
        [printed] = tmp_path.glob(f"outputs/sweeps/*/*/console/00{number}.txt")
        assert "the last words\n" in printed.read_text()


def test_only_runs_that_differ_in_numbers_are_computed_together(capsys):
    typed = (*DOUBLE, "model=tiny", "seed=0,1", "model.hidden=4,8", "parallel=single,dp", "sweep.stack=4")
    planner = Planner(sweep_jobs := SweepJobs(Composer(), [quoted(word, sweep=True) for word in typed]), None)
    keys: dict[str, list[str]] = {}
    for number, overrides in enumerate(sweep_jobs):
        rest = " ".join(word for word in overrides if word.startswith(("model.", "parallel=")))
        keys.setdefault(rest, []).append(planner.plan(number, overrides).stack_key)
    assert len(keys) == 4
    assert all(first == second for first, second in keys.values())
    assert len({first for first, _ in keys.values() if first}) == 2
    assert [rest for rest, each in keys.items() if each == ["", ""]] == [rest for rest in keys if "dp" in rest]
    assert "sweep.stack=4: jobs are computed one by one, as parallel=dp divides" in capsys.readouterr().err


def test_what_is_wrong_with_the_option_is_said_before_anything_runs(tmp_path):
    for words, text in {
        ("sweep.stack=0",): "sweep.stack: got 0",
        ("sweep.stack=some",): "sweep.stack: got 'some'",
        ("sweep=slurm", "sweep.stack=2"): "sweep.stack: got 2: on other machines, each job is computed alone",
    }.items():
        code, console = run_in_this_process(["-m", "seed=0,1", *words], tmp_path)
        assert code == 2
        assert text in console
    assert not (tmp_path / "outputs").exists()
