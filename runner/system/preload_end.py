"""Enables the garbage collector again. A fork server imports this module after the modules that it preloads.

The objects of the preloaded modules are excluded from later collections, so that no child examines them for garbage.
"""

import gc

gc.freeze()
gc.enable()
