"""The pool when the server ends a connection under a statement."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from pydantic import SecretStr

from common.database import Database
from common.settings import SharedSettings


async def test_a_connection_that_the_server_ends_is_told_as_such_and_replaced(database) -> None:
    """Not as "cannot call Connection.terminate()", which hid the reason in the log."""
    pool = Database(SharedSettings(database_url=SecretStr(database.url), database_pool_size=1), "pool-test")
    await pool.open()
    try:
        with pytest.raises((asyncpg.AdminShutdownError, asyncpg.ConnectionDoesNotExistError)):
            async with pool.connection() as connection:
                statement = asyncio.ensure_future(connection.fetchval("SELECT pg_sleep(20)"))
                while not database.sessions("pool-test"):
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.1)
                database.terminate_sessions()
                await statement
        assert pool.in_use == 0
        async with pool.connection() as connection:
            assert await connection.fetchval("SELECT 1") == 1
    finally:
        await pool.close(5)


async def test_a_connection_that_ended_while_it_was_held_is_replaced(database) -> None:
    pool = Database(SharedSettings(database_url=SecretStr(database.url), database_pool_size=1), "pool-test")
    await pool.open()
    try:
        with pytest.raises(asyncpg.InterfaceError, match="fetchval"):
            async with pool.connection() as connection:
                await connection.fetchval("SELECT 1")
                database.terminate_sessions()
                await asyncio.sleep(0.5)
                await connection.fetchval("SELECT 1")
        async with pool.connection() as connection:
            assert await connection.fetchval("SELECT 1") == 1
    finally:
        await pool.close(5)
