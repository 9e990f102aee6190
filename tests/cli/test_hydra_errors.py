"""Errors of Hydra in words of ours; each kind is typed in test_main.py."""

from __future__ import annotations

from hydra.errors import HydraException

from runner.cli.hydra_errors import explain


def test_an_unknown_error_of_hydra_is_cut_to_eight_lines() -> None:
    told = explain(HydraException("\n".join(f"line {i}" for i in range(50))))
    assert told.splitlines() == [f"line {i}" for i in range(8)]
    assert explain(HydraException("")) == ""
