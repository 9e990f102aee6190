"""A fork server imports this module before the modules that it preloads, which takes less time without collections.

Objects that exist at a fork are excluded from later collections: no child examines them, or copies their memory.
"""

import gc
import os

gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
