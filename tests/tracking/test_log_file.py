"""Tests of the log of a run: the file has all messages, and the console those from level INFO on."""

import io
import logging
import os
import sys
import warnings
from contextlib import suppress

import pytest

from runner.tracking.log_file import LogFile


@pytest.mark.parametrize(("rank", "name"), [(0, "log.txt"), (2, "log_rank_2.txt")])
def test_the_file_of_each_rank_has_all_messages_and_the_console_those_of_rank_0_from_info_on(
    rank, name, tmp_path, capsys
):
    log = logging.getLogger("runner.anything")
    with LogFile(tmp_path, rank), warnings.catch_warnings():
        warnings.simplefilter("always")
        log.debug("a detail")
        log.error("something")
        warnings.warn("a library's", stacklevel=1)
        assert capsys.readouterr().err == ("something\n" if rank == 0 else "")
    log.warning("afterwards")
    [path] = tmp_path.iterdir()
    written = path.read_text()
    assert path.name == name
    assert "DEBUG runner.anything: a detail" in written
    assert "ERROR runner.anything: something" in written
    assert "a library's" in written
    assert "afterwards" not in written


def test_messages_from_before_the_directory_is_known_are_written_to_the_file(tmp_path, capsys):
    log = logging.getLogger("runner.anything")
    with LogFile(None) as file:
        log.info("early")
        assert capsys.readouterr().err == "early\n"
        file.open(tmp_path)
        log.info("late")
    written = [line.split(" INFO ")[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert written == ["runner.anything: early", "runner.anything: late"]
    with LogFile(tmp_path):
        log.info("of a second session")
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 3


@pytest.mark.parametrize("why", ["No space left on device", "Is a directory"])
def test_a_log_that_cannot_be_written_is_reported_once_and_logging_goes_on(why, tmp_path, capsys):
    if why == "Is a directory":
        (tmp_path / "log.txt").mkdir()
    else:
        (tmp_path / "log.txt").symlink_to("/dev/full")
    with LogFile(tmp_path):
        for text in ("first", "second"):
            logging.getLogger("runner.anything").warning(text)
    report = f"{tmp_path}/log.txt cannot be written ({why}): later messages will be missing from it; the run goes on"
    assert capsys.readouterr().err == f"{report}\nfirst\nsecond\n"


class Broken(io.StringIO):
    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error


def test_messages_are_written_to_the_file_if_the_console_fails(tmp_path, monkeypatch):
    with LogFile(tmp_path):
        for error in (OSError(28, "No space left"), BrokenPipeError(), ValueError("closed")):
            monkeypatch.setattr(sys, "stderr", Broken(error))
            logging.getLogger("runner.anything").error("something")
    assert (tmp_path / "log.txt").read_text().count("ERROR runner.anything: something\n") == 3


def test_secrets_are_hidden_and_odd_bytes_escaped(tmp_path, capsys):
    log = logging.getLogger("runner.anything")
    with LogFile(tmp_path):
        log.error("reading %s of %s", "https://ann:s3cret@host/x", os.fsdecode(b"a\xff.png"))
        try:
            raise ValueError("token=s3cret is too old")
        except ValueError as error:
            log.error("crashed", exc_info=error)
    for text in ((tmp_path / "log.txt").read_text(), capsys.readouterr().err):
        assert "s3cret" not in text
        assert "reading https://ann:***@host/x of a\\xff.png" in text
        assert "ValueError: token=*** is too old" in text


def test_logging_is_restored_even_after_an_error(tmp_path):
    logger, captured = logging.getLogger("runner"), logging.getLogger("py.warnings")

    def state() -> tuple[object, ...]:
        return list(logger.handlers), logger.level, logger.propagate, list(captured.handlers)

    before = state()
    with suppress(ValueError), LogFile(tmp_path):
        assert len(logger.handlers) == len(before[0]) + 2
        raise ValueError
    assert state() == before
