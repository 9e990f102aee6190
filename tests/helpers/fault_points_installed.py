"""Importing this module installs the points of `fault_points`; command servers of the kind `faults` import it."""

from helpers.fault_points import install

install()
