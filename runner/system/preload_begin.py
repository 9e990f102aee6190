"""Imported by a fork server before what it preloads (see `runner.system.garbage`)."""

import gc

gc.disable()
