"""Tests of `runner compare`, on runs whose results are written by the tests, so that every number is known."""

import csv
import io
import json
import math
import os
import re
from pathlib import Path

import pytest
from helpers.compose import compose_config
from helpers.handmade_runs import evaluation_entries, save_ledger, write_run_directory
from rich.console import Console
from scipy import stats

from runner.analysis.comparison import LAST, STEPS, Comparison, Spread
from runner.analysis.metrics import direction
from runner.analysis.saved_runs import MeasuredRun, find_runs, labels_of
from runner.analysis.tables import markdown as as_markdown
from runner.analysis.tables import terminal
from runner.commands import compare
from runner.storage.run_directory import lock


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run the command, which must succeed, and return what it prints."""
    assert compare.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture
def sweep(tmp_path) -> Path:
    """A sweep over two learning rates with two seeds each, plus a diverged, a killed and a refused job."""
    path = tmp_path / "sweep"
    jobs = []
    for number, (lr, seed, best, last) in enumerate(
        [(0.1, 0, 0.8, 0.7), (0.1, 1, 0.9, 0.8), (0.2, 0, 0.95, 0.9), (0.2, 1, 0.97, 0.96)]
    ):
        typed = [f"seed={seed}", f"optimizer.lr={lr}"]
        name = f"{number:03d}-{','.join(typed)}"
        more = {"seconds": 2.0 + seed, "samples_per_second": 100.0 * (1 + seed), "steps": 7}
        write_run_directory(path / name, *typed, **evaluation_entries(best, last, **more))
        jobs.append({"overrides": typed, "directory": name, "state": "done", "code": 0, "error": ""})
    write_run_directory(
        path / "004-diverged", "optimizer.lr=9", status="diverged", steps=3, error="the loss is not finite"
    )
    write_run_directory(path / "005-killed", "optimizer.lr=8")
    why = "optimizer.lr: got 1e9: it must be a number\n  see the comments"
    refused = {"overrides": ["seed=0", "optimizer.lr=1e9"], "directory": "006-refused", "state": "refused"}
    return save_ledger(path, *jobs, {**refused, "code": 2, "error": why})


def test_seeds_share_a_row_and_the_best_row_is_first(sweep, capsys):
    table = json.loads(compared(capsys, sweep, "--json"))
    assert (table["keys"], table["metric"], table["direction"]) == (["optimizer.lr"], "eval/accuracy", "max")
    best, other = table["rows"]
    assert (best["values"], best["runs"], other["values"]) == ({"optimizer.lr": 0.2}, 2, {"optimizer.lr": 0.1})
    assert best["best"] == {"mean": pytest.approx(0.96), "std": pytest.approx(0.01 * math.sqrt(2))}
    assert best["last"] == {"mean": pytest.approx(0.93), "std": pytest.approx(0.03 * math.sqrt(2))}
    assert best["steps"] == {"mean": 7, "std": 0}
    assert best["seconds"] == {"mean": pytest.approx(2.5), "std": pytest.approx(math.sqrt(0.5))}
    assert best["samples_per_second"]["mean"] == pytest.approx(150)
    assert [Path(path).name[:3] for path in best["directories"]] == ["002", "003"]


def test_failures_come_last_with_state_step_and_reason(sweep, capsys):
    why = "optimizer.lr: got 1e9: it must be a number see the comments"
    held = lock(write_run_directory(sweep / "007-running"))
    failures = json.loads(compared(capsys, sweep, "--json"))["failures"]
    assert held is not None
    held.close()
    assert [(f["run"], f["state"], f["step"], f["reason"]) for f in failures] == [
        ("004-diverged", "diverged", 3, "the loss is not finite"),
        ("005-killed", "killed", 7, "it was killed: it has no result"),
        ("006-refused", "refused", None, why),
        ("007-running", "running", 7, ""),
    ]
    assert [f["values"]["optimizer.lr"] for f in failures[:3]] == [9, 8, "1e9"]


def test_a_long_reason_is_whole_for_programs_and_keeps_its_end_in_a_table(tmp_path, capsys):
    why = f"ValueError: {'long ' * 60}(crashy.py:105)"
    write_run_directory(tmp_path / "a", status="crashed", error=why)
    assert json.loads(compared(capsys, tmp_path, "--json"))["failures"][0]["reason"] == why
    [row] = csv.DictReader(io.StringIO(compared(capsys, tmp_path, "--csv")))
    assert row["reason"] == why
    shown = compared(capsys, tmp_path, "--markdown").splitlines()[-1]
    assert "| ValueError: long" in shown
    assert "…" in shown
    assert shown.endswith("(crashy.py:105) |")
    assert len(shown) < 250


def test_csv_markdown_and_terminal_tables_show_the_same_values(sweep, capsys):
    rows = list(csv.DictReader(io.StringIO(compared(capsys, sweep, "--csv"))))
    assert [(row["optimizer.lr"], row["seed"], row["best eval/accuracy"], row["state"]) for row in rows] == [
        *(("0.2", "0", "0.95", "done"), ("0.2", "1", "0.97", "done")),
        *(("0.1", "0", "0.8", "done"), ("0.1", "1", "0.9", "done")),
        *(("9", "", "", "diverged"), ("8", "", "", "killed"), ("1e9", "", "", "refused")),
    ]
    assert [row["run"][:3] for row in rows] == ["002", "003", "000", "001", "004", "005", "006"]
    lines = compared(capsys, sweep, "--markdown").splitlines()
    assert lines[0].startswith(
        "| optimizer.lr | runs | best eval/accuracy | last eval/accuracy | steps | seconds | samples/s |"
    )
    assert lines[2] == "| 0.2 | 2 | 0.960 ± 0.014 | 0.930 ± 0.042 | 7 | 2.50 ± 0.71 | 150 ± 71 | the best |  |  |"
    assert "| 004-diverged | diverged | 3 | the loss is not finite |" in lines
    shown = compared(capsys, sweep).splitlines()
    assert next(line.split() for line in shown if line.split()[:1] == ["0.2"])[1:5] == ["2", "0.960", "±", "0.014"]


def test_many_differing_keys_are_shown_in_one_column_without_broken_words(tmp_path, capsys):
    more = ["optimizer.weight_decay=0.5", "schedule=cosine", "workload.label_smoothing=0.25", "log_every=7"]
    more += ["data.size=640", "max_grad_norm=0.5", "batch_size=32", "precision=bf16", "eval_every=77", "epochs=40"]
    write_run_directory(tmp_path / "a", "optimizer.lr=0.1", **evaluation_entries(0.9, 0.8))
    write_run_directory(tmp_path / "b", "optimizer.lr=0.2", *more, **evaluation_entries(0.95, 0.85))
    words = compared(capsys, tmp_path).split()
    assert words[:2] == ["options", "runs"]
    assert {"optimizer.lr=0.2", *more[:3]} <= {*words}
    assert words.index("optimizer.lr=0.2") < words.index("optimizer.lr=0.1")  # the best row is still the first
    assert "optimizer.lr,schedule," in compared(capsys, tmp_path, "--csv")  # in CSV, each key has a column


def test_seed_name_and_output_root_do_not_separate_rows_and_values_that_are_not_finite_are_left_out(tmp_path, capsys):
    numbers = (0, math.nan, 0.5), (0, math.inf, 0.5), (1, math.inf, 0.8)
    for i, (seed, best, last) in enumerate(numbers):
        keys = f"seed={seed}", f"name=n{i}", f"output_root=o{i}"
        write_run_directory(tmp_path / f"{i}", *keys, **evaluation_entries(best, last, seconds=math.inf))
    (row,) = json.loads(compared(capsys, tmp_path, "--json"))["rows"]
    assert row == {
        "values": {}, "runs": 3, "seeds": 2,
        "last": {"mean": pytest.approx(0.6), "std": pytest.approx(0.1 * math.sqrt(3))},
        "steps": {"mean": 7, "std": 0}, "contrast": None, "directories": [str(tmp_path / f"{i}") for i in range(3)],
    }  # fmt: skip
    assert "| 3 (2 seeds) |" in compared(capsys, tmp_path, "--markdown"), "a seed was run twice"


def test_runs_of_different_workloads_differ_in_what_was_typed_and_in_what_both_use(tmp_path, capsys):
    write_run_directory(tmp_path / "a", "optimizer.lr=0.1", **evaluation_entries(0.9, 0.8))
    for env in ("cartpole", "acrobot"):
        write_run_directory(tmp_path / env, "workload=dqn", f"env={env}", **evaluation_entries(5, 5, "eval/return"))
    table = json.loads(compared(capsys, tmp_path, "--json"))
    assert table["keys"] == ["optimizer.lr", "workload", "env"], "what follows from the workload was not typed"
    classifier = next(row["values"] for row in table["rows"] if row["values"]["workload"] == "classifier")
    assert classifier == {"optimizer.lr": 0.1, "workload": "classifier"}, "a classifier uses no environment"
    assert any(
        line.startswith("| 0.1 | classifier | – |") for line in compared(capsys, tmp_path, "--markdown").split("\n")
    )


def test_csv_cells_that_look_like_formulas_are_escaped(tmp_path, capsys):
    formulas = ["=1+1", "+A1", "-2+3", "@SUM(A1)"]
    for i, text in enumerate((*formulas, "-0.5", "a=b")):
        write_run_directory(tmp_path / f"{i}", status="crashed", error=text)
    write_run_directory(tmp_path / "6", **evaluation_entries(-0.5, -1e-5, metric="=loss"))
    rows = list(csv.DictReader(io.StringIO(compared(capsys, tmp_path, "--csv"))))
    assert [row["reason"] for row in rows] == ["", *(f"'{text}" for text in formulas), "-0.5", "a=b"]
    assert (rows[0]["best =loss"], rows[0]["last =loss"]) == ("-0.5", "-1e-05")


def test_a_metric_may_be_named_by_its_last_part_and_losses_are_ascending(tmp_path):
    for lr, loss in ((1, 0.5), (2, 0.3), (3, 0.4)):
        metrics = {"train/loss": 0.1, "eval/loss": loss, "episode/return": 3.0, "eval/length": 4.0}
        write_run_directory(tmp_path / str(lr), f"optimizer.lr={lr}", **evaluation_entries(0.9, 0.9, metrics=metrics))
    found = {name: Comparison([tmp_path], name) for name in ("loss", "train/loss", "return", "length")}
    assert [row.values["optimizer.lr"] for row in found["loss"].rows] == [2, 3, 1]
    assert found["loss"].measures == [LAST, STEPS]
    assert [each.metric for each in found.values()] == ["eval/loss", "train/loss", "episode/return", "eval/length"]
    assert "train/loss" in found["loss"].meant
    assert [bool(each.meant) for each in found.values()] == [True, False, True, True]
    assert found["loss"].meant in as_markdown(found["loss"])


def test_metric_direction_is_inferred_from_results_workload_or_name(tmp_path):
    def of(name: str, best: float, last: float, metric: str) -> str:
        return direction(
            metric, [MeasuredRun(write_run_directory(tmp_path / name, **evaluation_entries(best, last, metric)))]
        )

    assert of("a", 1.0, 2.0, "eval/mystery") == "min"
    assert of("b", 2.0, 1.0, "eval/mystery") == "max"
    assert of("c", 1.0, 1.0, "eval/accuracy") == "max"
    assert of("d", 1.0, 1.0, "eval/error_rate") == "min"
    names = {"eval/loss": "min", "eval/mape": "min", "eval/bits_per_byte": "min", "eval/mcc": "max", "eval/fid": None}
    assert {name: direction(name, []) for name in names} == names
    write_run_directory(tmp_path / "e", **evaluation_entries(1.0, 1.0, metrics={"eval/fid": 1.0}))
    fid, typed = Comparison([tmp_path / "e"], "eval/fid"), Comparison([tmp_path / "e"], "eval/fid", goal="min")
    assert (fid.direction, typed.direction, "--goal min" in fid.meant, typed.meant) == ("max", "min", True, "")


def test_the_steps_that_were_typed_and_those_that_were_done_are_two_columns(tmp_path, capsys):
    for typed, done in ((5, 5), (9, 6)):
        write_run_directory(tmp_path / f"{typed}", f"steps={typed}", **evaluation_entries(0.5, 0.5, steps=done))
    rows = csv.DictReader(io.StringIO(compared(capsys, tmp_path, "--csv")))
    assert sorted((row["steps"], row["steps done"]) for row in rows) == [("5", "5.0"), ("9", "6.0")]
    assert "| steps | runs | best eval/accuracy | last eval/accuracy | steps done |" in (
        compared(capsys, tmp_path, "--markdown")
    )


def test_options_are_shown_by_the_names_that_were_typed(tmp_path, capsys):
    for number, schedule in enumerate(("cosine", "onecycle")):
        write_run_directory(tmp_path / str(number), f"schedule={schedule}", **evaluation_entries(0.1, 0.1))
    mine = write_run_directory(tmp_path / "2", "schedule=cosine", "schedule.warmup=0.3", **evaluation_entries(0.1, 0.1))
    (mine / "overrides.yaml").write_text("- schedule=mine\n- optimizer=../x\n- seed=3\n")
    table = json.loads(compared(capsys, tmp_path, "--json"))
    assert sorted(row["values"]["schedule"] for row in table["rows"]) == ["cosine", "mine", "onecycle"]
    assert table["keys"] == ["schedule"]


def test_control_characters_are_escaped_and_symbolic_links_are_not_followed(sweep, capsys):
    outside = write_run_directory(sweep.parent / "outside", "optimizer.lr=0.73519", **evaluation_entries(1.0, 1.0))
    (sweep / "link").symlink_to(outside)
    linked = write_run_directory(sweep / "009-linked", "optimizer.lr=66")
    (linked / "result.json").symlink_to(outside / "result.json")
    evil = "\x1b[2J\x9b|\nnext\udcff"
    write_run_directory(sweep / "010-evil", status="crashed", error=evil)
    write_run_directory(sweep / os.fsdecode(b"011-\xff\x1b"), status=evil)
    for arguments in ((), ("--csv",), ("--markdown",), ("--json",)):
        out = compared(capsys, sweep, *arguments)
        assert out.encode()
        assert not {"\x1b", "\x9b"} & set(out)
        assert "0.73519" not in out
    (failure,) = (f for f in Comparison([sweep]).failures if f.run == "009-linked")
    assert failure.state == "damaged"
    assert "\\|" in compared(capsys, sweep, "--markdown")


@pytest.mark.cases(
    (["~nobody-of-this-name/x"], "PATH: got '~nobody-of-this-name/x': there is no such directory\n  name a run"),
    (["empty"], "PATH: got 'empty': it contains no run\n  name a run directory"),
    (
        ["sweep", "--metric", "accuracies"],
        "--metric: got 'accuracies': no run that is done has a finite value of it;\n",
    ),
)
def test_invalid_paths_and_options_are_refused(arguments, why, sweep, monkeypatch, capsys):
    monkeypatch.chdir(sweep.parent)
    (sweep.parent / "empty").mkdir()
    assert compare.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(why)
    assert printed.out == ""


def test_a_sweep_with_only_refused_jobs_is_a_table_of_failures_and_each_run_is_found_once(tmp_path, capsys):
    save_ledger(tmp_path, {"overrides": ["steps=x"], "directory": "000-steps=x", "state": "refused", "error": "steps"})
    assert "| 000-steps=x | refused |  | steps |" in compared(capsys, tmp_path, "--markdown").splitlines()
    run = write_run_directory(tmp_path / "a" / "b")
    write_run_directory(tmp_path / "c")
    assert [each.directory.name for each in find_runs([tmp_path, tmp_path / "a", run])] == ["b", "c"]


def test_options_are_labeled_by_file_name_without_the_keys_they_set(tmp_path):
    for i, (model, lr) in enumerate([("convnet", 0.1), ("tiny", 0.1), ("tiny", 0.2)]):
        write_run_directory(tmp_path / f"{i}", f"model={model}", f"optimizer.lr={lr}", **evaluation_entries(1, 1))
    comparison = Comparison([tmp_path])
    assert sorted(comparison.keys) == ["model", "optimizer.lr"]
    assert comparison.rows[0].values == {"model": "convnet", "optimizer.lr": 0.1}
    assert labels_of(compose_config("workload=dqn"))["workload"] == "dqn"
    labels = labels_of(compose_config("optimizer=adamw", "optimizer.lr=0.5", "model=tiny", "model.hidden=7"))
    assert (labels["optimizer"], labels["optimizer.lr"], labels["model"]) == ("adamw", 0.5, "tiny")


def test_mean_and_spread_are_rounded_to_two_digits_of_the_spread():
    pairs = [(0.001234, 0.0000523), (5.0, 0.0), (0.0, 0.0), (5.31789, math.nan)]
    texts = ["0.001234 ± 0.000052", "5.0000 ± 0.0000", "0.0 ± 0.0", "5.318"]
    assert [str(Spread(*pair)) for pair in pairs] == texts


def write_seeds(path: Path, losses: dict[float, list[float]], metric: str = "eval/loss") -> Path:
    """Write a run for each learning rate and each of the losses, with the seeds 0, 1, …; the last is also the best."""
    for lr, values in losses.items():
        for seed, loss in enumerate(values):
            entries = evaluation_entries(loss, loss, metric)
            write_run_directory(path / f"{lr}-{seed}", f"optimizer.lr={lr}", f"seed={seed}", **entries)
    return path


def test_rows_are_compared_with_the_best_one(tmp_path, capsys):
    losses = {0.1: [1.00, 1.02, 0.98, 1.01], 0.2: [0.52, 0.49, 0.51, 0.50], 0.3: [0.54, 0.48, 0.50, 0.53]}
    write_seeds(tmp_path, losses)
    write_run_directory(tmp_path / "one", "optimizer.lr=0.4", **evaluation_entries(0.3, 0.3, "eval/loss"))
    write_run_directory(tmp_path / "killed", "optimizer.lr=0.3", "seed=4")
    table = json.loads(compared(capsys, tmp_path, "--json"))
    assert table["reference"] == {"optimizer.lr": 0.2}, "the best row has one seed"
    rows = {row["values"]["optimizer.lr"]: row["contrast"] for row in table["rows"]}
    assert rows[0.4] is rows[0.2] is None
    near, far = rows[0.3], rows[0.1]
    theirs = stats.ttest_rel(losses[0.3], losses[0.2])
    assert (near["test"], near["compared_seeds"], near["differs"]) == ("paired t-test", [4, 4], False)
    assert near["difference"] == pytest.approx(0.0075)
    assert (near["low"], near["high"]) == pytest.approx(theirs.confidence_interval(0.95))
    assert near["uncorrected_p"] == pytest.approx(theirs.pvalue)
    assert near["seeds_needed"] > 4
    assert far["differs"]
    assert far["p"] == pytest.approx(3 * stats.ttest_rel(losses[0.1], losses[0.2]).pvalue), "of three pairs"
    lines = list(csv.DictReader(io.StringIO(compared(capsys, tmp_path, "--csv"))))
    assert {float(line["p"]) for line in lines if line["optimizer.lr"] == "0.1"} == {far["p"]}
    assert {line["difference"] for line in lines if line["optimizer.lr"] in ("0.2", "0.4")} == {""}
    marked = [line for line in compared(capsys, tmp_path, "--markdown").splitlines() if line.count("≈") and "|" in line]
    assert [line.split()[1] for line in marked] == ["0.3"]


def test_two_rows_and_against_give_sentences(tmp_path, capsys):
    write_seeds(tmp_path, {0.1: [0.80, 0.81, 0.82], 0.2: [0.90, 0.92, 0.91], 0.3: [0.85, 0.70, 0.90]}, "eval/accuracy")
    assert len(json.loads(compared(capsys, tmp_path, "--json"))["notes"]) == 1
    for name in ("optimizer.lr=0.1", "0.1-2", str(tmp_path / "0.1-0")):
        table = json.loads(compared(capsys, tmp_path, "--against", name, "--json"))
        assert table["reference"] == {"optimizer.lr": 0.1}
        assert [row["contrast"] and row["contrast"]["differs"] for row in table["rows"]] == [True, False, None]
        first, second = table["notes"]
        assert first.startswith(
            "With optimizer.lr=0.2, the best eval/accuracy (mean ± standard deviation over seeds) is"
        )
        assert all(text in first for text in ("0.910 ± 0.010 (n = 3)", "+0.100", "95 % confidence", "is significant"))
        assert "is not significant" in second
        assert f"takes {table['rows'][1]['contrast']['seeds_needed']:,} seeds" in second
    assert compare.main([str(tmp_path), "--against", "optimizer.lr=7"]) == 2
    assert "--against: got 'optimizer.lr=7': no row" in capsys.readouterr().err


def test_single_seeds_say_nothing_and_seeds_run_twice_count_once(tmp_path, capsys):
    single = write_seeds(tmp_path / "single", {0.1: [0.8], 0.2: [0.9]})
    table = json.loads(compared(capsys, single, "--json"))
    assert [row["contrast"] for row in table["rows"]] == [None, None]
    assert "nothing can be said" in table["notes"][0]
    twice = write_seeds(tmp_path / "twice", {0.1: [0.8, 0.9], 0.2: [0.5, 0.7]})
    write_run_directory(twice / "again", "optimizer.lr=0.1", "seed=1", **evaluation_entries(0.7, 0.7, "eval/loss"))
    [found] = Comparison([twice]).contrasts.values()
    assert (found.values, found.others) == (pytest.approx([0.8, 0.8]), [0.5, 0.7])


def test_narrow_terminals_get_further_columns_below(tmp_path, monkeypatch):
    write_seeds(tmp_path, {0.1: [0.8, 0.81], 0.2: [0.805, 0.92]})
    monkeypatch.setenv("TERM", "dumb")
    comparison = Comparison([tmp_path])
    for width in (80, 60, 40):
        console = Console(file=io.StringIO(), width=width, height=50)
        with console.capture() as shown:
            console.print(terminal(comparison, width))
        lines = shown.get().splitlines()
        assert max(map(len, lines)) <= width
        words = " ".join(lines).split()
        assert words.count("optimizer.lr=0.1") > 1, "each part of the table has the options, in one piece"
        assert {"0.8050", "difference", "p", "needed"} <= {*words}
        assert re.search(r" \[-\d\.\d+, \+\d\.\d+\] ", " ".join(words)), "intervals are in one piece"


def test_a_job_that_the_pruner_stopped_is_pruned_and_not_stopped(tmp_path):
    for name in ("000-a", "001-b", "002-c"):
        write_run_directory(
            tmp_path / name, f"optimizer.lr=0.{name[2]}", status="stopped" if name[2] != "0" else "done"
        )
    jobs = [{"state": state, "directory": name} for state, name in (("done", "000-a"), ("pruned", "001-b"))]
    save_ledger(tmp_path, *jobs, {"state": "stopped", "directory": "002-c"})
    found = Comparison([tmp_path])
    assert [(each.run, each.state) for each in found.failures] == [("001-b", "pruned"), ("002-c", "stopped")]
