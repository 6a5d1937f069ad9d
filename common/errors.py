"""Exceptions of both daemons; each docstring is what an operator is told."""

from __future__ import annotations

import asyncpg

DATABASE_ERRORS = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # A connection that the server ends while a statement is being sent: asyncpg finds itself in the wrong state.
    asyncpg.InternalClientError,
)
"""What a statement may raise without a fault of ours: the database refused, is away, or went away meanwhile."""


class RelayDrainError(Exception):
    """Base of the errors that these programs raise on purpose."""


class ConfigurationError(RelayDrainError):
    """A setting, or a combination of settings, would break a promise; the message has the numbers."""


class SchemaMismatch(RelayDrainError):
    """The database's schema is missing, too old, or more than one revision newer than this program."""
