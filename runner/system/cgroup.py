"""The resource limits of this process's Linux control groups, versions 1 and 2.

https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def cgroup_limits(controller: str, *names: str) -> Iterator[list[str]]:
    """Yield the words of the files `names` for this process's control group and each of its ancestors.

    Args:
        controller: the controller of the files, `cpu` or `memory`.
        names: file names; groups without these files are skipped.
    """
    for line in read_lines(_PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP  # version 1 has one hierarchy per controller
        group = root / path.lstrip("/")
        # In a container the path may be that of the host; the group of the container is then the mounted root.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            words = [word for name in names for line in read_lines(folder / name) for word in line.split()]
            if words:
                yield words


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; empty if it cannot be read, as on an operating system that does not have it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
