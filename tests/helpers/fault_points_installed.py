"""Importing this module installs the points of `fault_points`: the fork server of the tests preloads it."""

from helpers.fault_points import install

install()
