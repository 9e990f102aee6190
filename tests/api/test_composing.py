"""Tests of `runner.compose`: the config equals that of the command, and Hydra's global state does not change."""

import subprocess
import sys

import pytest
from helpers.command import child_environment
from helpers.compose import compose_config
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

import runner
from runner.config.options import CONF

WORDS = ["parallel=ddp", "precision=16", "optimizer.lr=0.25"]


def test_a_config_has_the_values_that_the_command_composes():
    config = runner.compose(WORDS)
    assert {**config, "name": "test"} == compose_config(*WORDS)
    assert config["optimizer"]["lr"] == 0.25
    assert config.overrides == ("parallel=ddp", "precision='16'", "optimizer.lr=0.25")
    assert OmegaConf.create(str(config)) == OmegaConf.create(dict(config))


def test_the_overrides_of_a_changed_config_are_those_of_its_values():
    config = runner.compose(["model=tiny", "optimizer.lr=0.2", "data.crop=0"])
    assert config.overrides == ("model=tiny", "optimizer.lr=0.2", "data.crop=0")
    config["optimizer"]["lr"], config["max_grad_norm"] = 0.1, 1.5
    config["precision"] = runner.compose(["precision=bf16"])["precision"]
    assert {*config.overrides} == {
        "model=tiny",
        "data.crop=0",
        "optimizer.lr=0.1",
        "max_grad_norm=1.5",
        "precision=bf16",
    }
    assert runner.compose(config.overrides) == config


def test_composing_does_not_change_the_global_state_of_hydra():
    before, config = HydraConfig.instance().cfg, OmegaConf.create({"own": 1})
    HydraConfig.instance().cfg = config  # pyright: ignore[reportAttributeAccessIssue]
    instances, resolvers = dict(Singleton._instances), dict(BaseContainer._resolvers)
    try:
        runner.compose(WORDS)
        assert Singleton._instances == instances
        assert BaseContainer._resolvers == resolvers
        assert HydraConfig.instance().cfg is config
    finally:
        HydraConfig.instance().cfg = before


@pytest.mark.filterwarnings("ignore:(?s).*version_base")  # which Hydra 1.4 does not take
def test_a_program_that_uses_hydra_itself_can_compose():
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF)):
        assert runner.compose(["seed=7"])["seed"] == 7
        assert hydra_compose("config", ["name=test", "seed=3"])["seed"] == 3


@pytest.mark.cases(
    (["seeed=1"], "seeed"),
    (["--cfgg"], "--cfgg"),
    (["resume=nowhere"], "resume"),
    (["name=${nothing}"], "name"),
    ("parallel=ddp", "overrides"),
    ([3], "overrides"),
)
def test_mistakes_are_config_errors_that_name_the_key(words, key):
    with pytest.raises(runner.ConfigError) as error:
        runner.compose(words)
    assert error.value.key.partition(".")[0] == key
    assert error.value.remedy


def test_importing_the_package_imports_nothing_large_and_composing_needs_no_torch():
    source = (
        "import sys, runner; print({'torch', 'numpy', 'hydra', 'omegaconf'} & {*sys.modules});"
        "runner.compose(['seed=1']); print('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", source]
    done = subprocess.run(words, env=child_environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nFalse\n"


def test_every_exported_name_exists():
    assert {name for name in runner.__all__ if getattr(runner, name, None) is None} == set()
    assert set(runner.__all__) <= set(dir(runner))
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = runner.trian
