"""Config groups that were added: a config of an earlier version has them with the values that change nothing."""

from __future__ import annotations

from helpers.compose import FAST, built, composed

from runner.config.added_groups import ADDED_GROUPS, with_added_groups


def test_the_config_of_an_earlier_version_is_that_of_this_one() -> None:
    now = composed(*FAST)
    earlier = {group: node for group, node in now.items() if group not in ADDED_GROUPS}
    assert with_added_groups(earlier) == now
    assert with_added_groups(built(*FAST, "stop.max_time=5").config)["stop"]["max_time"] == 5


def test_what_is_no_config_of_a_run_stays_as_it_is() -> None:
    assert with_added_groups({"optimizer": {"lr": 0.1}}) == {"optimizer": {"lr": 0.1}}
