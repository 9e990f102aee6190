"""Tests of `runner.config.references`: a config is what its references stand for, but no file has a credential."""

from typing import Any

import pytest
from helpers.dry_run import run_in_this_process
from omegaconf import OmegaConf

from runner.config.composition import Composer, composition_errors
from runner.config.errors import ConfigError
from runner.config.hydra_errors import explain
from runner.config.overrides import quoted
from runner.config.references import computed, resolved, with_variables
from runner.resume.changed_options import differences
from runner.run import build_run, config_hash
from runner.sweeps.sweep_jobs import Planner, SweepJobs


@pytest.mark.cases(
    ({"a": 1, "b": "${a}"}, {"a": 1, "b": 1}),
    ({"a": {"b": ["${oc.env:SECRET}"]}}, {"a": {"b": ["${oc.env:SECRET}"]}}),
    ({"a": "x ${oc.env:SECRET} y"}, {"a": "x ${oc.env:SECRET} y"}),
    ({"a": "${oc.env:SECRET}", "b": "${a}/c"}, {"a": "${oc.env:SECRET}", "b": "${oc.env:SECRET}/c"}),
    ({"a": "${oc.env:SECRET}/${b}", "b": "${c}", "c": 5}, {"a": "${oc.env:SECRET}/5", "b": 5, "c": 5}),
    ({"a": "${b}/${oc.env:SECRET}", "b": 5}, {"a": "5/${oc.env:SECRET}", "b": 5}),
    ({"a": "{${oc.env:SECRET}}${b}}", "b": 5}, {"a": "{${oc.env:SECRET}}5}", "b": 5}),
    ({"a": "${oc.env:SECRET,x:${b}}${b}", "b": 5}, {"a": "${oc.env:SECRET,x:5}5", "b": 5}),
    ({"a": "${oc.env:SECRET,{}}${b}", "b": 5}, {"a": "${oc.env:SECRET,{}}5", "b": 5}),
    ({"a": "${oc.env:A,${oc.env:B,${oc.env:SECRET}}}"}, {"a": "${oc.env:A,${oc.env:B,${oc.env:SECRET}}}"}),
    ({"a": "${ oc.env:SECRET}${oc.env : SECRET}"}, {"a": "${ oc.env:SECRET}${oc.env : SECRET}"}),
    ({"a": "${oc.decode:${b}}", "b": "${oc.env:N}"}, {"a": "${oc.decode:${oc.env:N}}", "b": "${oc.env:N}"}),
    ({"output_root": "${oc.env:NUMBER}/x", "name": "${oc.env:NUMBER}"}, {"output_root": "3/x", "name": "3"}),
    ids=str,
)
def test_references_to_the_environment_are_kept(config, wanted, monkeypatch):
    monkeypatch.setenv("SECRET", "hidden")
    monkeypatch.setenv("NUMBER", "3")
    assert resolved(OmegaConf.create(config)) == wanted


@pytest.mark.cases(
    ("${oc.env:NUMBER}", "3"),
    ("x/${oc.env:NUMBER}/${b}", "x/3/5"),
    ("${oc.env:NONE,7}", "7"),
    ("${oc.env:A,${oc.env:B,7}}", "7"),
    ("${oc.decode:${oc.env:NUMBER}}", 3),
    ("${eval:'${oc.env:NUMBER} * ${b}'}", 15),
    ("${oc.env:URL}", "${oc.env:URL}"),
    ("https://me:${oc.env:WORD}@host", "https://me:${oc.env:WORD}@host"),
    ids=str,
)
def test_a_variable_that_is_no_credential_is_its_value(text, wanted, monkeypatch):
    monkeypatch.setenv("NUMBER", "3")
    monkeypatch.setenv("WORD", "word")
    monkeypatch.setenv("URL", "https://me:word@host")
    assert resolved(OmegaConf.create({"a": text, "b": 5}))["a"] == wanted


def test_options_of_trackers_and_of_credentials_keep_their_references(monkeypatch):
    monkeypatch.setenv("WORD", "word")
    config = {"tracking": {"a": "${oc.env:WORD}"}, "b": {"password": ["${oc.env:WORD}"]}, "c": "${b.password}"}
    kept = ["${oc.env:WORD}"]
    assert resolved(OmegaConf.create(config)) == {"tracking": {"a": kept[0]}, "b": {"password": kept}, "c": kept}
    words = ["tracking.a=${oc.env:WORD}", "b.password=${oc.env:WORD}", "seed=${oc.env:WORD}"]
    assert [with_variables(word) for word in words] == [*words[:2], "seed=word"]


def composed_config(*words: str) -> dict[str, Any]:
    return build_run(Composer().run(words).config).config


def composed_hash(*words: str) -> str:
    return config_hash(composed_config(*words))


def test_a_run_with_variables_is_the_run_with_their_values(monkeypatch):
    words = (
        "optimizer.lr=${oc.env:LR}",
        "seed=${oc.env:SEED}",
        "schedule=step",
        "schedule.milestones=[${oc.env:LR},0.5]",
    )
    plain = "optimizer.lr=0.01", "seed=5", "schedule=step", "schedule.milestones=[0.01,0.5]"
    monkeypatch.setenv("LR", "1e-2")
    monkeypatch.setenv("SEED", "5")
    run = build_run(Composer().run(words).config)
    assert (run.config["seed"], run.config["optimizer"]["lr"]) == (5, 0.01)
    assert run.config["schedule"]["milestones"] == [0.01, 0.5]
    assert config_hash(run.config) == composed_hash(*plain)
    monkeypatch.setenv("SEED", "6")
    assert config_hash(run.config) != composed_hash(*words)
    assert [each[:3] for each in differences(run.config, composed_config(*words))] == [("seed", 5, 6)]


def test_the_number_of_a_job_is_that_of_the_sweep_and_0_in_a_single_run(tmp_path):
    words = ["epochs=1,2", "seed=${hydra:job.num}"]
    jobs = SweepJobs(Composer(), words)
    assert [jobs.compose(i, job).config["seed"] for i, job in enumerate(jobs)] == [0, 1]
    assert Composer().run(words[1:]).config["seed"] == 0
    planner = Planner(jobs, None)
    planner.path = tmp_path
    [flag] = [word for word in planner.plan(1, [*jobs][1]).arguments if word.startswith("--job-number")]
    code, printed = run_in_this_process(["--cfg", "job", "seed=${hydra:job.num}", flag], tmp_path)
    assert (code, "\nseed: 1\n" in printed) == (0, True)
    file = tmp_path / "mine.py"
    file.write_text("model = data = None", encoding="utf-8")
    assert Composer().run([f"workload={file}", *words[1:]]).config["seed"] == 0


def test_a_reference_to_nothing_is_refused_by_its_key_beside_code_of_the_users(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("model = data = None", encoding="utf-8")
    for word in ("optimizer.lr=${nope}", "optimizer.lr=${eval:1/0}"):
        with pytest.raises(Exception) as refused, composition_errors():
            Composer().run([f"workload={file}", word])
        assert explain(refused.value).startswith("optimizer.lr: ")


@pytest.mark.cases(
    ("1 + 2 * 3", 7),
    ("-(7 // 2) % 5", 2),
    ("min(0.1, 3 / 4) * 2", 0.2),
    ("round(sqrt(17))", 4),
    ("int(2.9)", 2),
    (5, 5),
    ("1e400", "not finite"),
    ("1 / 0", "cannot be computed"),
    ("1 +", "cannot be computed"),
    ("2 ** 3", "no arithmetic"),
    ("__import__('os')", "no arithmetic"),
    ("(1).real", "no arithmetic"),
    ("True", "no arithmetic"),
)
def test_arithmetic_is_computed_and_nothing_else(text, wanted):
    if not isinstance(wanted, str):
        assert computed(text) == wanted
    else:
        with pytest.raises(ValueError, match=wanted):
            computed(text)


@pytest.mark.cases(
    ("optimizer.lr=${eval:'${batch_size} * 1e-3'}", 0.064),
    ("optimizer.lr=${eval:${batch_size}/640}", 0.1),
    ("optimizer.lr=${eval:'min(${batch_size}, 1) / 4'}", 0.25),
)
def test_a_value_may_be_computed_from_another_key(word, wanted):
    assert Composer().run([word]).config["optimizer"]["lr"] == wanted
    several = [job[0] for job in SweepJobs(Composer(), [quoted(f"{word},0.5", sweep=True)])]
    assert [SweepJobs(Composer(), []).compose(0, [each]).config["optimizer"]["lr"] for each in several] == [wanted, 0.5]


def test_what_cannot_be_computed_is_refused_by_its_key_and_the_error_names_eval():
    with pytest.raises(Exception, match="mul") as refusal:
        Composer().run(["optimizer.lr=${mul:2,3}"])
    assert explain(refusal.value).startswith("optimizer.lr: ")
    assert "${eval:'${KEY} * 2'}" in explain(refusal.value)
    with pytest.raises(ConfigError, match=r"^seed: got .*a whole number"):
        build_run(Composer().run(["seed=${eval:1/2}"]).config)
