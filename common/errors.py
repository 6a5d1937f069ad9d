"""Exceptions of both daemons; each docstring is what an operator is told."""

from __future__ import annotations


class RelayDrainError(Exception):
    """Base of the errors that these programs raise on purpose."""


class ConfigurationError(RelayDrainError):
    """A setting, or a combination of settings, would break a promise; the message has the numbers."""


class SchemaMismatch(RelayDrainError):
    """The database's schema is missing, too old, or more than one revision newer than this program."""
