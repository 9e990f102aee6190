"""Imported by a fork server before the modules that it preloads (see `runner.system.garbage_collection`)."""

import gc

gc.disable()
