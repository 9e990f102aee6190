"""Tests of sweeps and searches as users type, stop and resume them."""

import signal

import pytest
from helpers.command import Command, glob, run_command, wait_until
from helpers.compose import TINY_CPU
from helpers.dry_run import run_in_this_process

from runner.storage.ledger_file import read_ledger
from runner.storage.run_directory import read_result

LR = "optimizer.lr=tag(log,interval(1e-3,1e-1))"
REFUSED = {
    "optimizer.lr=interval(0,1)": ["optimizer.lr: got 'interval(0,1)'", "sweep.search=tpe"],
    "seed=1,2  sweep.search=grid  sweep.trials=1": ["sweep.trials: got 1", "tries all combinations"],
    "optimizer.lrr=interval(0,1)  sweep.search=tpe": [
        "optimizer.lrr: there is no such key",
        "did you mean optimizer.lr?",
    ],
    f"{LR}  sweep.search=bayes": ["sweep.search: got 'bayes'", "random, tpe, grid"],
    f"{LR}  sweep.search=grid": ["sweep.search: got 'grid'", "a grid needs a list of values"],
    "seed=1  sweep.search=tpe": ["sweep.search: got 'tpe'", "no key has several values"],
    f"{LR}  sweep.search=tpe  sweep.metric=eval/loss": ["sweep.metric: got 'eval/loss'", "add sweep.goal=min"],
    f"{LR}  sweep.search=tpe  sweep.prune=median  tracking=csv": ["sweep.prune: got 'median'", "tracking=tensorboard"],
    f"{LR}  seed=1,2  sweep.search=tpe  sweep.seeds=3": ["sweep.seeds: got 3", "seed is swept, too"],
    "parallel=single,pipline": ["parallel: got 'pipline'", "did you mean pipeline?"],
    "seed=1,2  resume=outputs/x": ["resume: got 'outputs/x'", "resume=auto"],
}


@pytest.mark.parametrize("line", REFUSED)
def test_invalid_searches_are_refused_and_leave_no_files(line, tmp_path):
    code, output = run_in_this_process(["-m", *line.split("  ")], tmp_path)
    assert code == 2, output
    for words in REFUSED[line]:
        assert words in output
    assert not list(tmp_path.iterdir())


def test_a_search_of_which_a_trial_diverges_prints_a_command_that_reproduces_the_best_one(tmp_path):
    wild = ("data.crop=0", "schedule=constant", "batch_size=32", "steps=40", "log_every=10", "output_root=runs")
    code, output = run_command(*TINY_CPU, "-m", "optimizer.lr=0.1,900", *wild, "sweep.search=grid", cwd=tmp_path)
    [path] = tmp_path.glob("runs/sweeps/classifier/*")
    entries = {entry["state"]: entry for entry in read_ledger(path)["jobs"].values()}
    assert (code, entries.keys()) == (0, {"diverged", "done"}), output
    best = read_result(path / entries["done"]["directory"])["best"]["value"]
    assert f"best eval/accuracy {best:.4f}: " in output
    [line] = [line for line in output.splitlines() if line.startswith("run: python -m runner ")]
    code, again = run_command(*line.removeprefix("run: python -m runner ").split(), cwd=tmp_path)
    assert code == 0, again
    [single] = tmp_path.glob("runs/classifier/*")
    assert read_result(single)["best"]["value"] == best, "the same run"


@pytest.mark.parametrize("kind", [("sweep.search=grid",), ()], ids=["search", "sweep"])
def test_jobs_compared_by_several_metrics_end_with_their_front(kind, tmp_path):
    words = [*TINY_CPU, "-m", "optimizer.lr=0.001,0.01,0.1", "steps=3", "output_root=runs", *kind]
    words += ["sweep.metric=[eval/loss,eval/accuracy]", "sweep.goal=[max,null]"]
    code, output = run_in_this_process(words, tmp_path)
    assert code == 0, output
    [path] = tmp_path.glob("runs/sweeps/classifier/*")
    points = [
        tuple(read_result(job)["metrics"][tag] for tag in ("eval/loss", "eval/accuracy")) for job in path.glob("00*")
    ]
    front = sorted(
        (p for p in points if not any(a >= p[0] and b >= p[1] and (a, b) != p for a, b in points)), reverse=True
    )
    lines = [line for line in output.splitlines() if line.startswith("front")]
    assert len(lines) == len(front)
    assert read_ledger(path)["metrics"] == {"eval/loss": "max", "eval/accuracy": "max"}
    if not kind:
        return
    assert [line.partition(": ")[0] for line in lines] == [
        f"front_{at} eval/loss {loss:.4f}, eval/accuracy {accuracy:.4f}" for at, (loss, accuracy) in enumerate(front, 1)
    ]
    (path / "conf" / "experiment" / "front_9.yaml").touch()
    assert run_in_this_process([*words, "resume=auto"], tmp_path)[0] == 0
    files = {file.stem: file.read_text() for file in (path / "conf" / "experiment").iterdir()}
    assert sorted(files) == [f"front_{at}" for at in range(1, len(front) + 1)], "of today's front alone"
    assert all(f"  lr: {line.rpartition('optimizer.lr=')[2].split()[0]}\n" in files[line.split()[0]] for line in lines)
    [command] = [line for line in output.splitlines() if line.startswith("run: python -m runner ")]
    assert "experiment=front_1" in command


def test_a_resumed_search_shows_the_trials_that_failed_before(tmp_path):
    words = [*TINY_CPU, "-m", "batch_size=64,50000", "sweep.search=grid", "steps=2"]
    for more, text in (((), "1 of 2 jobs done, 1 refused"), (("resume=auto",), "a larger sweep.trials adds other")):
        code, output = run_in_this_process([*words, *more], tmp_path)
        assert (code, "1 of 2 jobs done, 1 refused" in output, text in output) == (2, True, True), output


STOPPED = {
    "a sweep": ("seed=0,1",),
    "a search": ("optimizer.lr=interval(0.01,0.05)", "sweep.search=random", "sweep.trials=2"),
}
"""Sweeps of two jobs."""
OTHERS = [("a sweep", signal.SIGTERM), ("a search", signal.SIGKILL)]


@pytest.mark.cases(
    *(("a sweep", signal.SIGKILL), ("a search", signal.SIGTERM)),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS),
)
def test_a_stopped_sweep_resumes_where_it_was_stopped(kind, sent, tmp_path, monkeypatch):
    """The resumed sweep keeps the directories of its jobs, although the sweep was started without `resume=auto`."""
    monkeypatch.chdir(tmp_path)
    words = (*TINY_CPU, "-m", *STOPPED[kind], "steps=60", "save_every=20", "eval_every=0", "output_root=runs")
    command = Command(tmp_path, *words, STEP_GATE=f"50:{tmp_path / 'go'}")
    wait_until(
        lambda: (
            command.command_exit_code is not None
            or len(glob(tmp_path, "runs/sweeps/*/*/00*/checkpoints/step_????????")) > 1
        )
    )
    command.signal_processes(sent)
    assert command.wait()[0] == (75 if sent == signal.SIGTERM else -signal.SIGKILL), command.console
    assert "press Ctrl-C to stop at once" not in command.console, "the scheduler prints its own message"
    (tmp_path / "go").touch()  # the jobs keep running after the command was killed
    [path] = tmp_path.glob("runs/sweeps/*/*")
    before = sorted(job.name for job in path.glob("0*"))
    code, output = run_command(*words, "resume=auto", cwd=tmp_path)
    assert code == 0, output
    assert [path] == list(tmp_path.glob("runs/sweeps/*/*")), "the same sweep"
    jobs = sorted(path.glob("0*"))
    assert set(before) <= {job.name for job in jobs}
    assert len(jobs) == 2
    assert all(read_result(job)["steps"] == 60 for job in jobs)
    if sent == signal.SIGTERM:
        assert any("resumed after step" in (job / "log.txt").read_text() for job in jobs)
    if kind == "a search":
        best = (path / "conf" / "experiment" / "best.yaml").read_text()
        assert "resume: " not in best
        assert "output_root: " not in best
