"""Wake-up: a LISTEN connection that shortens the wait of an idle relay. The tick remains the truth.

Everything here may fail and nothing is lost: a lost notification costs at most one tick.
"""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from common.backoff import Backoff
from common.database import connect_arguments
from common.errors import DATABASE_ERRORS
from common.lifecycle import Lifecycle
from common.logs import Logger
from common.outage import Outage
from common.schema import wakeup_channel
from common.settings import SharedSettings
from relay import events
from relay.settings import RelaySettings

CHECK_SECONDS = 5.0
"""A LISTEN connection can be dead without a sign (MagicStack/asyncpg#519): it is asked this often."""


class Wakeup:
    """One background task; sets every lane's event when the outbox's trigger speaks."""

    def __init__(
        self,
        shared: SharedSettings,
        settings: RelaySettings,
        lifecycle: Lifecycle,
        lanes: list[asyncio.Event],
        logger: Logger,
    ) -> None:
        self._arguments = connect_arguments(shared, "relay-listen")
        if settings.listen_url is not None:
            self._arguments["dsn"] = settings.listen_url.get_secret_value()
        self._channel = wakeup_channel(shared.database_schema)
        self._lifecycle = lifecycle
        self._lanes = lanes
        self._logger = logger

    async def run(self) -> None:
        """Listen until cancelled; a lost connection is opened again, and then every lane looks once."""
        backoff = Backoff(0.25, 10.0)
        outage = Outage(self._logger, events.WAKEUP_LOST, events.WAKEUP_LISTENING)
        while True:
            try:
                await self._listen(outage, backoff)
            except DATABASE_ERRORS as error:
                outage.failed(error)
                await asyncio.sleep(backoff.next())

    async def _listen(self, outage: Outage, backoff: Backoff) -> None:
        connection = await asyncpg.connect(**self._arguments)
        try:
            closed = asyncio.Event()
            connection.add_termination_listener(lambda _: closed.set())
            await connection.add_listener(self._channel, self._notified)
            if not outage.lasting:
                self._logger.emit(events.WAKEUP_LISTENING)
            outage.worked()
            backoff.reset()
            self._wake()  # what was committed before LISTEN took hold was not announced to us
            while not closed.is_set():
                try:
                    async with asyncio.timeout(CHECK_SECONDS):
                        await closed.wait()
                except TimeoutError:
                    await connection.execute("SELECT 1")
            raise ConnectionResetError("the LISTEN connection was closed")
        finally:
            connection.terminate()

    def _notified(self, *_: Any) -> None:
        self._wake()

    def _wake(self) -> None:
        for lane in self._lanes:
            lane.set()
