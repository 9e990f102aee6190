"""Tests of `runner.config.added_groups`: config groups that a config of an earlier version lacks are added to it."""

from __future__ import annotations

from helpers.compose import TINY_CPU, build_composed_run, compose_config

from runner.config.added_groups import ADDED_GROUPS, with_added_groups


def test_missing_groups_are_added_to_the_config_of_an_earlier_version() -> None:
    now = compose_config(*TINY_CPU)
    earlier = {group: node for group, node in now.items() if group not in ADDED_GROUPS}
    assert with_added_groups(earlier) == now
    assert with_added_groups(build_composed_run(*TINY_CPU, "stop.max_time=5").config)["stop"]["max_time"] == 5


def test_a_mapping_that_is_not_the_config_of_a_run_is_unchanged() -> None:
    assert with_added_groups({"optimizer": {"lr": 0.1}}) == {"optimizer": {"lr": 0.1}}
