"""Imported by a fork server before the modules that it preloads (see `runner.system.garbage`)."""

import gc

gc.disable()
