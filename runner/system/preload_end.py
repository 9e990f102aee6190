"""Imported by a fork server after the modules that it preloads, so that no child examines their objects for garbage."""

import gc

gc.freeze()
gc.enable()
