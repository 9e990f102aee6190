"""Tests of `resume=PATH`: the saved config, which is untrusted, gives the defaults, and typed overrides change them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command import run_command, run_successfully
from helpers.compose import TINY_CPU, compose_config
from omegaconf import OmegaConf

import runner
from runner.storage.saved_run import config_text

STEPS = ("steps=4", "save_every=2", "eval_every=0", "log_every=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    words = [*TINY_CPU, *STEPS, "optimizer=adam", "optimizer.lr=0.002", "name=first", f"output_root={root}"]
    return runner.train(words).directory


@pytest.fixture
def run(trained: Path, tmp_path, monkeypatch) -> Path:
    """Return a copy of the run directory, as if it came from an untrusted source."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return Path(shutil.copytree(trained, tmp_path / "theirs" / trained.name))


def show(*words: str) -> dict[str, Any]:
    return dict(runner.compose(words))


def refused(*words: str) -> runner.ConfigError:
    with pytest.raises(runner.ConfigError) as refusal:
        runner.train(words)
    return refusal.value


def saved(run: Path) -> dict[str, Any]:
    config: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    return config


def change(run: Path, **values: Any) -> None:
    """Change values of the saved config, and write it with a valid SHA-256."""
    (run / "config.yaml").write_text(config_text(saved(run) | values))


def tree(path: Path) -> dict[str, bytes]:
    found = [file for file in path.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def test_the_saved_values_are_the_defaults(run):
    shown = show(f"resume={run}")
    assert {key: shown[key] for key in saved(run)} == saved(run) | {"resume": str(run)}
    assert (shown["optimizer"]["lr"], shown["name"], shown["steps"]) == (0.002, "first", 4)
    code, console = run_command(f"resume={run}", "--cfg", "job", cwd=Path.cwd())
    assert (code, yaml.safe_load(console)["optimizer"]) == (0, shown["optimizer"]), console
    assert show(f"resume={run}", "epochs=1")["steps"] is None, "typed epochs go before saved steps"
    for prefix in ("+", "++"):
        assert show(f"{prefix}resume={run}", "++steps=9") == show(f"resume={run}", "steps=9")


@pytest.mark.parametrize("folder", ["experiment", "local"])
def test_an_option_file_cannot_name_the_run_to_resume(folder, run, tmp_path):
    before = tree(run)
    mine = tmp_path / "mine" / folder / "default.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(f"# @package _global_\nresume: {run}\n")
    chosen = ["experiment=default"] * (folder == "experiment")
    with pytest.raises(runner.ConfigError) as refusal:
        runner.compose(chosen, config_dir=tmp_path / "mine")
    assert (refusal.value.key, refusal.value.got) == ("resume", str(run))
    assert tree(run) == before
    again = runner.compose([*chosen, f"resume={run}"], config_dir=tmp_path / "mine")
    assert (again["resume"], again["optimizer"]["lr"]) == (str(run), 0.002)


def test_overrides_change_the_saved_values(run):
    shown = show(f"resume={run}", "optimizer.lr=0.1", "parallel=ddp", "parallel.processes=3", "steps=9")
    before = saved(run)
    assert shown["optimizer"] == before["optimizer"] | {"lr": 0.1}
    assert shown["parallel"] == compose_config("parallel=ddp", "parallel.processes=3")["parallel"]
    for key in ("model", "data", "seed", "schedule", "save_every"):
        assert shown[key] == before[key]
    assert shown["steps"] == 9
    del before["tracking"]
    (run / "config.yaml").write_text(config_text(before))
    assert show(f"resume={run}")["tracking"] == compose_config()["tracking"], "a group that the saved config lacks"


def test_saved_overrides_are_appended_to_but_not_applied(run):
    (run / "overrides.yaml").write_text("- seed=5\n- --experimental-rerun=x\n- steps=4\n- hydra.run.dir=/nowhere\n")
    runner.train([f"resume={run}", "steps=5"])
    listed = ["seed=5", "--experimental-rerun=x", "hydra.run.dir=/nowhere", f"resume='{run}'", "steps=5"]
    assert yaml.safe_load((run / "overrides.yaml").read_text()) == listed
    assert saved(run)["seed"] == 0


HOSTILE: dict[str, dict[str, Any]] = {
    "defaults": {"defaults": ["_self_"]},
    "unknown key": {"hook": "os.system"},
    "class of another package": {"model": {"_target_": "hydra.utils.instantiate"}},
    "class of another group": {"model": {"_target_": "runner.device.Device"}},
    "defaults of a component": {"schedule": {"_target_": "runner.schedule.Constant", "defaults": ["/model/resnet50"]}},
    "no component": {"model": "resnet50"},
    "reference in a list": {"model": {"_target_": "runner.model.networks.ConvNet", "freeze": ["${oc.env:HOME}"]}},
    "reference in a node of a list": {"keep": [{"x": "${oc.env:HOME}"}]},
    "missing": {"steps": "???"},
    "out of range": {"steps": -1},
    "long name": {"model": {"_target_": f"runner{3000 * '.a'}.A"}},
    "empty part": {"model": {"_target_": "runner..A"}},
    "file elsewhere": {"tracking": {"_target_": "runner.tracking.remote_backends.Trackio", "project": "../x"}},
    "number for a name": {"env": {"_target_": "runner.env.base.Env", "id": -1}},
    "module to import": {"env": {"_target_": "runner.env.base.Env", "id": "__hello__:CartPole-v1"}},
}


@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_config_is_refused_and_nothing_is_written(values, run, tmp_path):
    change(run, **values)
    before = tree(tmp_path)
    error = refused(f"resume={run}")
    assert next(iter(values)) in str(error).splitlines()[0]
    assert error.got == "${oc.env:HOME}" or "oc.env" not in str(values), "it is the reference that is refused"
    assert tree(tmp_path) == before


def test_a_download_has_to_be_typed_again(run, tmp_path):
    """If a saved config could turn on `data.download`, it could make the command write files to any directory."""
    mnist = {"_target_": "runner.data.torchvision_data.Mnist", "root": str(tmp_path / "elsewhere"), "download": True}
    change(run, data=mnist)
    assert show(f"resume={run}")["data"] == mnist | {"download": False}
    assert show(f"resume={run}", "data.download=true")["data"]["download"] is True
    assert refused(f"resume={run}").key == "data.root"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.cases(
    ("tracking.remote_backends.MLflow", "uri", "http://localhost:1"),
    ("tracking.remote_backends.Wandb", "mode", "online"),
    ("env.base.Env", "id", "mine:Game-v0"),
    ("optimizer.SGD", "lr", "${oc.env:LR}"),
)
def test_what_is_not_trusted_has_to_be_typed_again(node, key, value, run, monkeypatch):
    monkeypatch.setenv("LR", "0.5")
    group = node.partition(".")[0]
    change(run, **{group: {"_target_": f"runner.{node}", key: value}})
    error = refused(f"resume={run}")
    assert (error.key, error.got) == (f"{group}.{key}", value)
    typed = show(f"resume={run}", f"{group}.{key}='{value}'")[group][key]
    assert typed == ("0.5" if value == "${oc.env:LR}" else value)


def test_an_environment_variable_in_a_saved_config_is_not_printed_or_saved(run):
    change(run, keep=[{"x": "${oc.env:SECRET}"}])
    code, console = run_command(f"resume={run}", "steps=5", cwd=Path.cwd(), SECRET="hidden treasure")
    assert (code, "keep" in console, "Traceback" in console) == (2, True, False)
    assert "treasure" not in console + "".join(map(str, tree(run).values()))


def test_an_environment_variable_is_used_but_the_value_of_a_credential_is_not_saved(tmp_path):
    typed = (*TINY_CPU, *STEPS, "optimizer.weight_decay=${oc.env:SECRET}", "optimizer.lr=${oc.env:RATE}")
    run_successfully(tmp_path, *typed, SECRET="0.2516273", RATE="0.0625")
    [run] = tmp_path.glob("outputs/*/*")
    assert saved(run)["optimizer"]["weight_decay"] == "${oc.env:SECRET}"
    assert saved(run)["optimizer"]["lr"] == 0.0625
    assert not [name for name, content in tree(run).items() if b"0.2516273" in content]
    error = refused(*typed[:-1])
    assert (error.key, "SECRET" in error.why) == ("optimizer.weight_decay", True)


def test_the_trackers_of_a_saved_config_are_those_of_their_names(run):
    theirs = {"mlflow": {"_target_": "runner.tracking.remote_backends.MLflow", "uri": "https://example.com"}}
    several = {"_target_": "runner.tracking.base.MultiTracker", "names": ["csv", "mlflow"], "trackers": theirs}
    change(run, tracking=several)
    shown = show(f"resume={run}")["tracking"]
    assert shown == show("tracking=[csv,mlflow]")["tracking"]
    assert shown["trackers"]["mlflow"]["uri"].startswith("sqlite:")
