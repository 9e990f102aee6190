"""The limits that Linux control groups put on this process, versions 1 and 2.

https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def cgroup_limits(controller: str, *names: str) -> Iterator[list[str]]:
    """The words of the files `names`, in this process's control group and in each group above it that has them."""
    for line in read_lines(_PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP  # a hierarchy a controller is version 1
        own = root / path.lstrip("/")
        # Inside a container the path may be the host's: its own group is then the mounted root.
        for folder in (own, *(above for above in own.parents if above.is_relative_to(root))):
            words = [word for name in names for line in read_lines(folder / name) for word in line.split()]
            if words:
                yield words


def read_lines(path: Path) -> list[str]:
    """The lines of a file; none where it cannot be read, as on another system."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
