"""The exit codes of the command."""

DONE, CRASHED, REFUSED, DIVERGED = 0, 1, 2, 3

STOPPED = 75
"""A stop signal arrived, or the time `stop.max_time` was up. A run that had begun is saved: the same command with
`resume=auto` continues it.

The number is that of `EX_TEMPFAIL` in sysexits.h, a temporary failure, so that a scheduler may start the command again.
"""

INTERRUPTED = 130
"""Ctrl-C was pressed before training began, or after an earlier stop signal: no further checkpoint was saved."""
