"""Tests of `runner.config.composition`: Hydra only composes configs, and must not run code or write files."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.config.composition import Composer
from runner.config.errors import ConfigError
from runner.config.hydra_errors import config_error
from runner.sweeps.sweep_jobs import SweepJobs


def options(directory: Path, name: str, text: str) -> Composer:
    """Write the option file `name` to `directory`, and return a composer with `--config-dir=directory`."""
    path = directory / f"{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text if text.startswith("#") else f"# @package _global_\n{text}\n")
    return Composer(str(directory))


SECTIONS = {
    "hydra: {launcher: {_target_: helpers.plugin_component.PluginSGD}}": "hydra.launcher",
    "hydra: {run: {dir: x}}": "hydra.run",
    "hydra: 3": "hydra",
    "hydra: {sweeper: 3}": "hydra.sweeper",
    "defaults: 3": "defaults",
    "hydra: {sweeper: {max_batch_size: 1}}": "hydra.sweeper",
    "defaults:\n  - override /hydra/job_logging: stdout\n  - _self_": "hydra/job_logging",
    "# @package hydra.job\nenv_set: {X: y}": "hydra.job",
}


@pytest.mark.parametrize("section", SECTIONS)
def test_an_option_file_that_sets_a_hydra_key_is_refused(section, tmp_path):
    composer, words = options(tmp_path, "experiment/mine", section), ["experiment=mine"]
    with pytest.raises(ConfigError) as refusal:
        composer.run(words)
    assert refusal.value.key.startswith(SECTIONS[section])
    with pytest.raises(ConfigError) as refusal:
        SweepJobs(composer, ["seed=1,2", *words])
    assert refusal.value.key.startswith(SECTIONS[section])


def test_hydra_verbose_searchpath_and_sweeper_params_are_allowed(tmp_path):
    composer = options(tmp_path, "experiment/mine", "hydra: {verbose: false, sweeper: {params: {seed: '3,4'}}}")
    assert composer.run(["experiment=mine", "hydra.verbose=false"]).config["seed"] == 0
    assert [job[0] for job in SweepJobs(composer, ["experiment=mine"])] == ["seed=3", "seed=4"]
    job = Composer().run([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine", "name=${hydra:job.name}"])
    assert (job.config["name"], job.overrides) == ("runner", ["experiment=mine", "name=${hydra:job.name}"])


def test_interpolations_are_resolved_by_each_job_and_not_by_the_sweep():
    jobs = SweepJobs(Composer(), ["seed=1,2", "name=run-${seed}", "output_root=${oc.env:NO_SUCH_VARIABLE}"])
    assert [job[1:] for job in jobs] == [["name=run-${seed}"]] * 2
    assert jobs.common == ["output_root=${oc.env:NO_SUCH_VARIABLE}"]
    words = ["seed=1,2", "name=job-${hydra:job.num}-${seed}"]
    jobs = SweepJobs(Composer(), words)
    assert [jobs.compose(i, job).config["name"] for i, job in enumerate(jobs)] == ["job-0-1", "job-1-2"]


def test_a_list_of_trackers_is_expanded_to_tracking_several():
    short, full = Composer().run(["seed=1", "tracking=[csv,tensorboard]"]), ["tracking.names=[csv,tensorboard]"]
    assert short == Composer().run(["seed=1", "tracking=several", *full])
    assert [*short.config["tracking"]["trackers"]] == ["csv", "tensorboard"]
    sweep = Composer().sweep(["seed=1,2"])
    assert Composer().job(sweep, 0, ["seed=1", "tracking=[csv]"]).config["tracking"]["names"] == ["csv"]


def test_typed_epochs_go_before_the_steps_of_an_option_file(tmp_path):
    composer = options(tmp_path, "experiment/short", "steps: 10")
    for typed, steps, epochs in (
        ([], 10, 20),
        (["++epochs=2"], None, 2),
        (["epochs=2", "steps=7"], 7, 2),
        (["workload.env_steps=500", "workload=dqn"], None, None),
    ):
        config = composer.run(["experiment=short", *typed]).config
        assert (config["steps"], config["epochs"]) == (steps, epochs)
    sweep = composer.sweep(["experiment=short"])
    assert composer.job(sweep, 0, ["experiment=short", "epochs=2"]).config["steps"] is None


def test_a_value_that_cannot_be_parsed_is_refused_by_its_key():
    with pytest.raises(ConfigError, match="extraneous") as refusal:
        Composer().run(["seed=1", "accumulation=${.}"])  # Hydra's error has no message, and its cause has
    assert (refusal.value.key, refusal.value.got) == ("accumulation", "${.}")


@pytest.mark.parametrize("name", ["", "/nowhere", "x" * 5000])
def test_a_config_dir_that_does_not_exist_is_refused(name):
    with pytest.raises(ConfigError) as refusal:
        Composer(name)
    assert (refusal.value.key, refusal.value.got) == ("--config-dir", name)


@pytest.mark.cases(
    [],
    ["steps=5", "seed=2", "steps=8"],
    ["model=tiny", "optimizer.lr=0.1", "++code.model=x", "+extra.key=3"],
    ["experiment=ten_epochs", "parallel=ddp", "optimizer={lr: 3}", "parallel.processes=3"],
    ["name=${hydra:job.override_dirname}", "steps=${epochs}", "~debug", "hydra.verbose=[runner]"],
    ["max_grad_norm=1", "~max_grad_norm"],
    ["optimizer.lrr=3"],
    ["steps=1,2", "seed=3"],
    ["model={name: x}"],
    ids=" ".join,
)
def test_a_config_is_what_hydra_composes_whatever_was_composed_before(words):
    def outcome(compose: Callable[[Composer], DictConfig]) -> Any:
        try:
            return OmegaConf.to_container(compose(Composer()), resolve=False)
        except Exception as error:
            return type(error), str(error)

    wanted = outcome(lambda composer: composer._loader.load_configuration("config", words, RunMode.RUN))
    for before in ([], ["seed=7"], words):
        outcome(lambda composer, before=before: composer._compose(before, RunMode.RUN))
        assert outcome(lambda composer: composer._compose(words, RunMode.RUN)) == wanted


def test_numbers_as_names_of_parameter_groups_are_texts():
    groups = Composer().run(["optimizer.groups={0:{lr:0.5},*.bias:{lr:0.1}}"]).config["optimizer"]["groups"]
    assert groups == {"0": {"lr": 0.5}, "*.bias": {"lr": 0.1}}


def test_deleting_a_key_that_is_null_is_refused_as_that_and_not_as_an_unknown_key():
    with pytest.raises(ConfigError) as refusal:
        Composer().run(["~max_grad_norm"])
    assert (refusal.value.key, refusal.value.why) == ("max_grad_norm", "it has no value that could be deleted")


def test_option_files_that_have_changed_are_read_again(tmp_path):
    def values() -> tuple[int, int]:
        config = Composer(str(tmp_path)).run(["seed=1", "experiment=mine"]).config
        return config["batch_size"], config["epochs"]

    local, experiment = tmp_path / "local" / "default.yaml", tmp_path / "experiment" / "mine.yaml"
    for number in (3, 5):
        for path, key in ((local, "batch_size"), (experiment, "epochs")):
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"# @package _global_\n{key}: {number}\n")
            os.utime(path, ns=(number, number))
        assert values() == (number, number)
    local.unlink()
    assert values() == (64, 5)
    experiment.unlink()
    with pytest.raises(MissingConfigException):
        values()


def test_options_of_a_config_dir_are_among_those_to_choose_from(tmp_path):
    for typed in ("mien", "nothing_like_it"):
        with pytest.raises(MissingConfigException) as raised:
            options(tmp_path / typed, "experiment/mine", "steps: 10").run([f"experiment={typed}"])
        refusal = config_error(raised.value)
        assert refusal is not None
        assert (refusal.key, refusal.got) == ("experiment", typed)
        assert "mine" in re.split(r"\W+", refusal.remedy)
