"""Tests of the translation of Hydra's errors; tests/commands/test_train.py has an example of each kind of error."""

from __future__ import annotations

import pytest
from hydra.errors import HydraException

from runner.config.composition import Composer
from runner.config.hydra_errors import config_error, explain
from runner.config.options import option_keys


def test_an_unknown_error_of_hydra_is_cut_to_eight_lines() -> None:
    output = explain(HydraException("\n".join(f"line {i}" for i in range(50))))
    assert output.splitlines() == [f"line {i}" for i in range(8)]
    assert explain(HydraException("")) == ""


def test_an_unknown_key_lists_the_keys_of_the_chosen_option() -> None:
    with pytest.raises(HydraException) as refusal:
        Composer().run(["data.zzz=1"])
    error = config_error(refusal.value)
    assert error is not None
    keys = sorted(set(option_keys("data", "digits")))
    assert (error.key, error.remedy) == ("data.zzz", f"choose from: {', '.join(f'data.{key}' for key in keys)}")


def test_a_misspelled_key_of_another_option_suggests_that_key() -> None:
    with pytest.raises(HydraException) as refusal:
        Composer().run(["schedule.milestons=[0.5]"])
    error = config_error(refusal.value)
    assert error is not None
    assert (error.key, error.remedy) == ("schedule.milestons", "did you mean schedule.milestones?")
