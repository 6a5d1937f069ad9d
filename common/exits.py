"""Exit codes of every command; a restart mends neither 2 nor 3."""

EXIT_OK = 0
EXIT_FAILED = 1
"""Of a daemon: an inner task died, the loop stalled, or the shutdown deadline passed."""
EXIT_SETTINGS = 2
"""Settings refused."""
EXIT_SCHEMA = 3
"""The schema does not fit."""
EXIT_INTERRUPTED = 130
"""Ctrl-C during a command; a daemon that is asked to stop ends with 0."""
