"""Tests of data workers with little shared memory, such as the 64 MB of Docker; each test mounts a /dev/shm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from helpers.command import TIMEOUT_SECONDS, child_environment

NAMESPACE = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
CAN_MOUNT = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(CAN_MOUNT, capture_output=True, check=False).returncode != 0,
    reason="no file system can be mounted here",
)


def read(count: int, option: str) -> str:
    """Return what `read_megabytes COUNT` prints if /dev/shm is mounted with `option`."""
    mount = f"mount -t tmpfs -o {option} tmpfs /dev/shm"
    words = [*NAMESPACE, "sh", "-c", f'{mount} && exec "$0" -m helpers.programs read_megabytes {count}', sys.executable]
    options = {"env": child_environment(), "capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    ended = subprocess.run(words, check=True, **options)  # type: ignore[call-overload]
    return ended.stdout


def test_batches_are_read_if_those_that_are_loaded_in_advance_fit() -> None:
    assert read(12, "size=8m") == "12\n"


@pytest.mark.parametrize(
    ("option", "why"), [("size=256k", "it has no room for a batch"), ("ro", "data workers cannot be started: ")]
)
def test_too_little_shared_memory_is_an_error_with_a_remedy(option: str, why: str) -> None:
    said = read(12, option)  # two workers, each with two batches in advance
    assert said.startswith(f"/dev/shm: {why}")
    assert "docker run --shm-size=" in said
    assert "data.workers=0" in said
