"""What an error of the database means to an operator, in one line: what happened, and what mends it."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import unquote, urlsplit

import asyncpg

# SQLSTATE, or its class, and what to do about it. The first that fits wins.
_HINTS = (
    ("28P01", "check user and password in DATABASE_URL"),
    ("28", "check user, password and pg_hba.conf"),
    ("3D000", "check the database's name in DATABASE_URL"),
    ("3F000", "check DATABASE_SCHEMA"),
    ("42P01", "check DATABASE_SCHEMA, or create the tables: python -m migrations upgrade"),
    ("42501", "grant the role what it needs: the check command names each missing privilege"),
    ("25006", "it is read-only: a standby, or default_transaction_read_only"),
    ("55P03", "another session holds a lock on these rows: try again later"),
    ("57014", "the statement took too long: narrow it with filters, or try again later"),
    ("57P", "it is starting, stopping, or ended the session: try again"),
    ("53300", "too many connections: lower DATABASE_POOL_SIZE or raise max_connections"),
    ("53", "it is out of memory, disk or connections"),
    ("08", "the connection was lost: try again"),
)


def describe_error(error: BaseException) -> str:
    """Return one line for an expected error, with a hint when there is one."""
    text, hint = explain(error)
    return f"{text} ({hint})" if hint else text


def explain(error: BaseException) -> tuple[str, str]:
    """Return what happened, and what mends it (empty when the text says all)."""
    text = " ".join(str(error).split()) or type(error).__name__
    match error:
        case asyncpg.PostgresError():
            state = error.sqlstate or ""
            hint = next((hint for start, hint in _HINTS if state.startswith(start)), "")
            return f"the database says: {text}", hint
        case TimeoutError():
            return (
                "the database did not answer in time",
                "is it reachable from here, or is a lock in the way?",
            )
        case socket.gaierror():
            return f"the database's host is unknown: {text}", "check the host in DATABASE_URL"
        case ssl.SSLError():
            return f"no TLS with the database: {text}", "check sslmode and sslrootcert in DATABASE_URL"
        case ConnectionRefusedError():
            return (
                f"nothing listens at the database's address: {text}",
                "is it running, and is the port right?",
            )
        case OSError():
            return f"no connection to the database: {text}", ""
        case asyncpg.InterfaceError() | asyncpg.InternalClientError():
            return f"no use of the database: {text}", ""
        case _:
            return text, ""


def address(url: str) -> str:
    """Return user, host, port and database of a URL, without the password and the parameters."""
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    name = unquote(user.partition(":")[0])
    return f"{name + '@' if name else ''}{hosts or 'localhost'}{parts.path}"
