"""The resource limits of this process's Linux control groups, versions 1 and 2.

https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def cgroup_limits(controller: str, *names: str) -> Iterator[list[str]]:
    """Yield the words in the files `names` of this process's control group, and then those of each ancestor.

    Control groups that have none of the files are skipped. `controller` is `cpu` or `memory`.
    """
    for line in read_lines(_PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP  # version 1 has one hierarchy per controller
        group = root / path.lstrip("/")
        # In a container, the path may be the one on the host; the container's own group is then mounted as the root.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            words = [word for name in names for line in read_lines(folder / name) for word in line.split()]
            if words:
                yield words


def read_lines(path: Path) -> list[str]:
    """Return the lines of the file at `path`; an empty list if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
