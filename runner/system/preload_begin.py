"""Disables the garbage collector. A fork server imports this module before the modules that it preloads.

Without garbage collection, the slow imports take less time (see `runner.system.garbage_collection`).
"""

import gc

gc.disable()
