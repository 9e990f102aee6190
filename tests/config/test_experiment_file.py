"""Tests of `runner.config.experiment_file`: the experiment written for some overrides composes to the same config."""

from pathlib import Path

import pytest
import yaml

from runner.config.composition import Composer
from runner.config.experiment_file import experiment_file


def written(overrides: list[str], directory: Path, config_dir: str | None = None) -> str:
    """Write the experiment `best` to `directory`, and return its content."""
    file = directory / "experiment" / "best.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(experiment_file(overrides, ["the best"], config_dir), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def test_the_last_choice_of_a_group_counts_and_deleted_keys_are_left_out():
    text = experiment_file(["optimizer=adamw", "~max_grad_norm", "optimizer=adam"], ["the best", "of all"])
    assert text.startswith("# @package _global_\n# the best\n# of all\ndefaults:\n")
    assert yaml.safe_load(text) == {"defaults": [{"override /optimizer": "adam"}, "_self_"]}


@pytest.mark.cases(
    ["experiment=[ten_epochs,dqn_mountaincar]", "++seed=4", "steps=null", "name="],
    ["experiment=ten_epochs", "debug=smoke", "seed=3", "model=resnet18", "model.freeze=[stem]", "optimizer={lr: 0.3}"],
    ["workload=dqn", "~model", "~ema", "precision='16'", "+x=[1,2]", "env.id=a/B-v1", "+env.options={a: 1, b: 'x'}"],
    ["tracking=[tensorboard,csv]", "data=imagefolder", "data.root=/data/run #1", "name='a, b'", "name=007"],
    ids=" ".join,
)
def test_a_written_experiment_composes_to_the_config_of_its_overrides(overrides, tmp_path):
    written(overrides, tmp_path)
    typed = Composer().run(overrides).config
    assert Composer(str(tmp_path)).run(["experiment=best"]).config == typed


def test_options_of_user_defined_groups_are_written_to_the_experiment(tmp_path):
    file = tmp_path / "mine" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("a: 1\nb: 2\n")
    overrides = ["+mine=mine", "mine.b=3"]
    assert "- /mine: mine\n" in written(overrides, tmp_path, str(tmp_path))
    typed = Composer(str(tmp_path)).run(overrides).config
    assert Composer(str(tmp_path)).run(["experiment=best"]).config == typed
    assert typed["mine"] == {"a": 1, "b": 3}
