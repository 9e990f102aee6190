"""A fork server imports this module before the modules that it preloads, which takes less time without collections.

Objects that exist at a fork are excluded from later collections: no child examines them, or copies their memory.
"""

import gc
import os

_SERVER = os.getpid()


def _freeze() -> None:
    if os.getpid() == _SERVER:  # a child may fork, too, as for data workers: what it frees must not stay
        gc.freeze()


gc.disable()
os.register_at_fork(before=_freeze, after_in_child=gc.enable)
