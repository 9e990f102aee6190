"""Tests of `runner.sweeps.sweep_jobs`: lists, paired values, ranges and intervals in the overrides of a sweep."""

import pytest
import torch
from hydra.errors import HydraException

from runner.config.composition import Composer
from runner.config.errors import ConfigError
from runner.config.overrides import quoted
from runner.sweeps.engines.base import Demand
from runner.sweeps.search_space import Interval
from runner.sweeps.sweep_jobs import Planner, SweepJobs
from runner.sweeps.sweep_values import parse_zip


def jobs(*overrides: str) -> SweepJobs:
    return SweepJobs(Composer(), list(overrides))


@pytest.mark.cases(
    ("p=zip(seed=[1,2],batch_size=[8,16])", ["seed=1,2", "batch_size=8,16"]),
    ("p=zip(model=[tiny,convnet], +x=['a,b',c])", ["model=tiny,convnet", "+x='a,b',c"]),
    ("p=zip(a=[[1,2],[3,4]],b=[{x:1},{x:2}])", ["a=[1,2],[3,4]", "b={x:1},{x:2}"]),
)
def test_parse_zip_returns_the_name_and_the_members(word, members):
    assert parse_zip(word) == ("p", members)


def test_paired_values_are_combined_with_others_but_not_with_each_other():
    sweep = jobs("pairs=zip(optimizer=[sgd,adam],optimizer.lr=[0.1,0.001])", "seed=1,2", "precision=bf16")
    assert sweep.swept == ["seed", "optimizer", "optimizer.lr"]
    assert len(sweep) == 4
    assert list(sweep) == [
        [seed, "precision=bf16", *pair]
        for seed in ("seed=1", "seed=2")
        for pair in (["optimizer=sgd", "optimizer.lr=0.1"], ["optimizer=adam", "optimizer.lr=0.001"])
    ]
    last = sweep.compose(3, list(sweep)[3]).config
    assert (last["optimizer"]["_target_"], last["optimizer"]["lr"], last["seed"]) == ("runner.optimizer.Adam", 0.001, 2)
    assert "pairs" not in last


def test_pairs_that_are_typed_count_and_not_those_of_an_option_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    params = "hydra: {sweeper: {params: {of_file: 'zip(seed=[1,2],batch_size=[3,4])', epochs: '1,2'}}}"
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{params}\n")
    composer, typed = Composer(str(tmp_path)), ["typed=zip(seed=[5,6],batch_size=[7,8])", "epochs=3"]
    of_file, both = (SweepJobs(composer, ["experiment=mine", *words]) for words in ([], typed))
    assert of_file.swept == ["epochs", "seed", "batch_size"]
    rest = ["epochs=3", "experiment=mine"]
    assert [*both] == [[*rest, "seed=5", "batch_size=7"], [*rest, "seed=6", "batch_size=8"]]


@pytest.mark.cases(
    ("optimizer.lr=range(0.1,0.8,0.1)", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
    ("optimizer.lr=range(0.5,0.1,-0.1)", [0.5, 0.4, 0.3, 0.2]),
    ("optimizer.lr=range(1e-3,3e-3,1e-3)", [0.001, 0.002]),
    ("optimizer.lr=sort(range(0.1,0.4,0.1),reverse=true)", [0.3, 0.2, 0.1]),
    ("optimizer.lr=float(range(1,4))", [1.0, 2.0, 3.0]),
    ("seed=sort(range(1,10,4),reverse=true)", [9, 5, 1]),
    ("seed=sort(range(7,0,-3))", [1, 4, 7]),
    ("optimizer.lr=sort(range(1.3,0,-0.5))", [0.3, 0.8, 1.3]),  # -0.2 would be the next one
    ("seed=range(3)", [0, 1, 2]),
    ("accumulation=range(1,3)", ["'1'", "'2'"]),
    ("accumulation=choice(1,2)", ["'1'", "'2'"]),
    ("precision=choice(bf16,32)", ["bf16", "'32'"]),
    ("precision=sort(64,16,32)", ["'16'", "'32'", "'64'"]),
    ("optimizer.lr=${oc.env:RATE,0.2},0.5", ["${oc.env:RATE,0.2}", 0.5]),  # not as Hydra escapes it
)
def test_ranges_are_decimal_and_functions_may_list_options_that_are_numbers(word, values):
    found = jobs(quoted(word, sweep=True))
    assert [*found] == [[f"{word.partition('=')[0]}={value}"] for value in values]
    Planner(found, None)  # the first one can be composed


@pytest.mark.cases(
    ("seed=shuffle(range(0,9))", 9), ("precision=shuffle(bf16,32,64,16)", 4), ("seed=shuffle(choice(5,6,7,8))", 4)
)
def test_a_shuffled_sweep_has_the_same_order_when_it_is_resumed(word, count):
    first, again = ([*jobs(quoted(word, sweep=True))] for _ in range(2))
    assert first == again
    assert len({*map(tuple, first)}) == count
    assert first != sorted(first)


def test_a_glob_of_a_key_lists_files_and_a_glob_of_a_group_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.csv", "a 1.csv", "c.tsv", "sub/d.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [*jobs("data.file=glob(*.csv)")] == [["data.file='a 1.csv'"], ["data.file='b.csv'"]]
    assert [*jobs("data.file=glob([**/*.csv,*.tsv],exclude=a*)")] == [
        [f"data.file='{name}'"] for name in ("b.csv", "c.tsv", "sub/d.csv")
    ]
    assert [*jobs("model=glob(resnet*)")] == [["model=resnet18"], ["model=resnet50"]]
    with pytest.raises(ConfigError, match=r"^data\.file: got 'glob\(\*\.txt\)': no file"):
        jobs("data.file=glob(*.txt)")


def test_dictionaries_are_merged_with_what_is_set_before_them_as_in_a_run():
    """In Hydra's own sweeps, the last one replaces the others."""
    for plus in ("", "+"):
        found = jobs("optimizer=sgd", f"{plus}optimizer={{lr:0.1}},{{lr:0.2}}", "optimizer={momentum:0},{momentum:0.5}")
        chosen = [found.compose(number, words).config["optimizer"] for number, words in enumerate(found)]
        assert [(each["lr"], each["momentum"]) for each in chosen] == [(0.1, 0), (0.1, 0.5), (0.2, 0), (0.2, 0.5)]
        assert {each["_target_"] for each in chosen} == {"runner.optimizer.SGD"}
    [words] = jobs("optimizer.lr=0.1", "optimizer.lr=0.2")
    assert words == ["optimizer.lr=0.2"]


def write_experiment(directory, name, params, sweep="{slots: 1}"):
    directory.mkdir(exist_ok=True)
    text = f"# @package _global_\nname: {name}\nsweep: {sweep}\nhydra: {{sweeper: {{params: {params}}}}}\n"
    (directory / f"{name}.yaml").write_text(text)


def test_what_option_files_and_globs_list_tells_sweeps_apart(tmp_path, monkeypatch):
    """Otherwise, a resumed sweep would run jobs again under other numbers."""
    monkeypatch.chdir(tmp_path)
    found, words = [], (["experiment=a"], ["experiment=a,b"], ["data.file=glob(*.csv)"], ["seed=1,2"])
    for values in ("0.1,0.2", "0.2,0.3"):
        (tmp_path / f"{values}.csv").touch()
        for name in "ab":
            write_experiment(tmp_path / "experiment", name, f"{{optimizer.lr: '{values}'}}")
        found.append([SweepJobs(Composer(str(tmp_path)), [*each]).listed for each in words])
    assert [one != other for one, other in zip(*found, strict=True)] == [True, True, True, False]
    assert found[0][0] == ["optimizer.lr=0.1,0.2"]
    assert found[0][3] == []


def test_each_swept_experiment_is_combined_with_what_it_sweeps_itself(tmp_path):
    write_experiment(tmp_path / "experiment", "a", "{optimizer.lr: '0.1,0.2', seed: '1,2'}")
    write_experiment(tmp_path / "experiment", "b", "{batch_size: '8,16'}")
    composer = Composer(str(tmp_path))
    found = SweepJobs(composer, ["experiment=a,b"])
    of_a = [["experiment=a", f"optimizer.lr={lr}", f"seed={seed}"] for lr in ("0.1", "0.2") for seed in (1, 2)]
    assert [*found] == [*of_a, ["experiment=b", "batch_size=8"], ["experiment=b", "batch_size=16"]]
    assert (found.swept, found.engine.slots) == (["experiment", "optimizer.lr", "seed", "batch_size"], 1)
    paired = SweepJobs(composer, ["p=zip(experiment=[a,b],epochs=[1,2])", "seed=7", "optimizer.lr=0.3"])
    assert [*map(sorted, paired)] == [
        sorted(["seed=7", "optimizer.lr=0.3", *words])
        for words in (
            ["experiment=a", "epochs=1"],
            ["experiment=b", "epochs=2", "batch_size=8"],
            ["experiment=b", "epochs=2", "batch_size=16"],
        )
    ]
    write_experiment(tmp_path / "experiment", "c", "{seed: '1,2'}", sweep="{slots: 2}")
    with pytest.raises(ConfigError, match=r"^experiment: its options say differently how"):
        SweepJobs(composer, ["experiment=a,c"])
    assert len(SweepJobs(composer, ["experiment=a,c", "sweep.slots=1"])) == 6
    write_experiment(tmp_path / "experiment", "d", "{optimizer.lr: 'interval(0,1)'}", sweep="{search: random}")
    with pytest.raises(ConfigError, match=r"^optimizer.lr: experiment=d searches an interval"):
        SweepJobs(composer, ["experiment=choice(d)"])


@pytest.mark.parametrize("prefix", ["", "++"])
def test_where_a_sweep_is_written_is_no_override_of_its_jobs(prefix):
    words = ["seed=7", f"{prefix}seed=1,2", f"{prefix}output_root=x", f"{prefix}resume=auto", f"{prefix}sweep.slots=1"]
    sweep = jobs(*words)
    assert list(sweep) == [[f"{prefix}seed=1"], [f"{prefix}seed=2"]]
    assert sweep.common == [f"{prefix}output_root=x", f"{prefix}resume=auto"]


@pytest.mark.parametrize("options", ["adam,sgd", "sgd,adam", "sgd,muon"])
def test_a_key_of_some_options_of_a_swept_group_is_set_by_each_job(options):
    found = jobs(f"optimizer={options}", "optimizer.momentum=0.7", "workload=regression", "sweep.slots=1")
    assert [job[0] for job in found] == [f"optimizer={option}" for option in options.split(",")]
    planned = [Planner(found, None).plan(number, job) for number, job in enumerate(found)]
    for job in planned:
        assert ("optimizer.momentum: there is no such key" in job.refusal) == ("adam" in job.overrides[0])
        if not job.refusal:
            assert found.compose(job.number, [*job.overrides]).config["optimizer"]["momentum"] == 0.7


def test_a_key_that_no_option_has_is_refused_before_any_job_runs():
    with pytest.raises(HydraException, match=r"optimizer\.momentun"):
        Planner(jobs("optimizer=sgd,adam", "optimizer.momentun=0.7"), None)


def test_options_that_are_numbers_can_be_paired():
    first, last = jobs("p=zip(precision=[32,bf16],accumulation=[1,2])")
    assert (first, last) == (["precision='32'", "accumulation='1'"], ["precision=bf16", "accumulation='2'"])


@pytest.mark.cases(
    ("p=zip(seed=[1,2],batch_size=[8])", "seed has 2, batch_size has 1"),
    ("p=zip(seed=[1,2],batch_size=[8,16],seed=[3,4])", "seed is in it twice"),
    ("p=zip(seed=[1,2])", "fewer than two keys"),
    ("p=zip(seed=[1,2],batch_size=8)", "'batch_size=8' is not of the form KEY=[VALUE,VALUE]"),
    ("p=zip(seed=[1,2],q=zip(a=[1],b=[2]))", "'q=zip(a=[1]' is not of the form KEY=[VALUE"),
    ("seed=3 p=zip(seed=[1,2],batch_size=[8,16])", "set by another override"),
    ("seed=1,2 seed=3", "it is swept, and then set by another override"),
    ("seed=1,2 batch_size=8 seed=3,4", "it is swept, and then set by another override"),
    ("resume=auto,never", "the same for all jobs"),
    ("seed=range(0,200) epochs=range(1,100)", "more than 10,000 jobs"),
    ("optimizer.lr=range(0,1e300,1e-300)", "more than 10,000 jobs"),  # it is not listed
    ("optimizer.lr=range(0.5,nan)", "a range needs numbers"),
    ("optimizer.lr=range(0,1,0)", "a step that is not 0"),
    ("optimizer.lr=interval(1,0) sweep.search=tpe", "empty or not finite"),
    ("optimizer.lr=interval(0,inf) sweep.search=tpe", "empty or not finite"),
    ("optimizer.lr=tag(log,interval(0,1)) sweep.search=tpe", "a logarithm needs values above 0"),
    ("optimizer.lr=tag(cubic,interval(0,1)) sweep.search=tpe", "the only tag of an interval is log"),
)
def test_invalid_pairs_ranges_and_intervals_are_refused(words, why):
    with pytest.raises(ConfigError) as refusal:
        jobs(*words.split())
    assert refusal.value.key == words.partition("=")[0]
    assert why in str(refusal.value)


@pytest.mark.cases(
    ("interval(0.1,1)", Interval(0.1, 1.0)),
    ("tag(log,interval(1e-4,1e-1))", Interval(1e-4, 1e-1, log=True)),
    ("int(interval(1,9))", Interval(1, 9, whole=True)),
)
def test_intervals_of_a_search_are_parsed(typed, interval):
    sweep = jobs(f"optimizer.lr={typed}", "optimizer=sgd,adam", "sweep.search=tpe")
    [found] = [each for each in sweep.dimensions if each.interval]
    assert (found.keys, found.interval) == (("optimizer.lr",), interval)
    assert sweep.swept == ["optimizer.lr", "optimizer"]


@pytest.mark.parametrize("workload", ["classifier", "regression"])
def test_the_metric_of_a_search_is_known_even_if_its_first_sample_is_refused(workload):
    planner = Planner(jobs(f"workload={workload}", "optimizer.lr=-1,0.1", "sweep.search=random"), None)
    assert planner.best == {"classifier": ("accuracy", "max"), "regression": ("loss", "min")}[workload]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
@pytest.mark.parametrize(
    ("engine", "device"), [("slurm", ["device=cuda", "device.index=3"]), ("ray", ["parallel=ddp", "device=cuda"])]
)
def test_jobs_for_gpus_are_planned_on_a_machine_without_gpus(engine, device, tmp_path):
    planner = Planner(jobs("seed=0,1", *device, f"sweep={engine}", "sweep.gpus=2", "device.threads=3"), None)
    planner.path = tmp_path
    planned = planner.plan(1, ["seed=1", *device, "device.threads=3"])
    assert (planned.refusal, planned.demand) == ("", Demand(1, 2, 3))
    with pytest.raises(ConfigError, match=r"^sweep.gpus: .*\n.*sweep.gpus=1"):
        Planner(jobs("seed=0,1", *device, f"sweep={engine}"), None)
    with pytest.raises(ConfigError, match=r"^device.kind: got 'cuda'"):
        Planner(jobs("seed=0,1", *device), None)
