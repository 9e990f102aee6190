"""Tests of `runner.sweep.console`, which reads the console file to which a job prints."""

from __future__ import annotations

from pathlib import Path

from runner.sweep.display import message


def test_a_console_file_in_a_symlinked_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "007.txt").write_text("secret\n")
    (tmp_path / "console").symlink_to("elsewhere")
    assert message(tmp_path / "elsewhere" / "007.txt") == "secret"
    assert message(tmp_path / "console" / "007.txt") == ""


def test_message_returns_the_last_ten_lines_of_a_file(tmp_path: Path) -> None:
    assert message(tmp_path / "missing") == ""
    path = tmp_path / "console"
    path.write_bytes(b"x" * 50_000 + b"\n\n" + b"".join(b"line %d \xff\n" % number for number in range(20)))
    assert message(path).splitlines() == [f"line {number} \ufffd" for number in range(10, 20)]
