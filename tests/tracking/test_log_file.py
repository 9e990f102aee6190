"""The log of a run: everything in the file, what matters on the console."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from runner.tracking.log_file import LogFile


def test_everything_is_in_the_file_and_info_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("runner.anything")
    with LogFile(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("always")
        log.debug("a detail")
        log.warning("something")
        warnings.warn("a library's", stacklevel=1)
    log.warning("afterwards")
    written = (tmp_path / "log.txt").read_text()
    assert "DEBUG runner.anything: a detail" in written
    assert "WARNING runner.anything: something" in written
    assert "a library's" in written
    assert "afterwards" not in written
    said = capsys.readouterr().err
    assert "something\n" in said
    assert "a detail" not in said


def test_a_full_disk_raises_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a device that is always full")
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with LogFile(tmp_path):
        logging.getLogger("runner.anything").warning("something")
    assert capsys.readouterr().err == "something\n"


def test_other_ranks_have_files_of_their_own_and_a_silent_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LogFile(tmp_path, rank=2):
        logging.getLogger("runner.anything").error("of rank 2")
    assert [path.name for path in tmp_path.iterdir()] == ["log_rank_2.txt"]
    assert "ERROR runner.anything: of rank 2" in (tmp_path / "log_rank_2.txt").read_text()
    assert capsys.readouterr().err == ""


def test_a_second_session_appends(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with LogFile(tmp_path):
            logging.getLogger("runner.anything").info(text)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["first", "second"]


def test_handlers_are_removed_also_after_an_error(tmp_path: Path) -> None:
    logger = logging.getLogger("runner")
    before = (list(logger.handlers), logger.propagate, list(logging.getLogger("py.warnings").handlers))
    with suppress(ValueError), LogFile(tmp_path):
        assert len(logger.handlers) == len(before[0]) + 2
        raise ValueError
    assert (list(logger.handlers), logger.propagate, list(logging.getLogger("py.warnings").handlers)) == before


def test_nothing_logged_leaves_no_file(tmp_path: Path) -> None:
    with LogFile(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
