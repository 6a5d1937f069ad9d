"""The process's one connection to RabbitMQ: opened in the background, and opened again whenever it is lost.

`ready` is asked before each BEGIN. It is true only while the connection is open, its exchange is there, and the
broker takes publishes; so a broker that is away, silent or blocked costs no transaction and no row's attempt.
An outage is said once and its end once (`common.outage`), however many attempts lie between.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass

from pamqp import commands
from yarl import URL

from common.backoff import Backoff
from common.errors import RelayDrainError
from common.logs import Logger, define
from common.outage import Outage
from relay.observer import PublishObserver, Silent
from relay.wire import ChannelClosed, ConfirmChannel, Link, LinkLost, WireError, connect

BROKER_CONNECTED = define("broker_connected", logging.INFO, "The broker's connection is open (again).")
BROKER_UNAVAILABLE = define(
    "broker_unavailable",
    logging.WARNING,
    "No usable connection to the broker; attempts go on with backoff, no row is touched meanwhile.",
)
BROKER_BLOCKED = define(
    "broker_blocked",
    logging.WARNING,
    "The broker takes no publishes (memory or disk alarm); relay publishes nothing until it does.",
)
BROKER_UNBLOCKED = define("broker_unblocked", logging.INFO, "The broker takes publishes again.")

_GOODBYE_SECONDS = 1.0  # for cleaning up behind a connection that is already of no use


class BrokerUnavailable(RelayDrainError):
    """The broker is away, silent, blocked or misconfigured. Nothing is published, no row is touched."""


class Misconfigured(WireError):
    """The exchange is missing, has other properties, or may not be declared: an operator must act."""


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """How to reach the broker and what must be there."""

    url: str
    exchange: str = "events"  # "": the default exchange, which always exists
    exchange_type: str = "topic"
    declare_exchange: bool = True  # False: it must exist already
    connect_timeout: float = 10.0  # seconds: look-up, TCP, TLS, handshake; then again for the exchange
    heartbeat: int = 30  # seconds
    backoff_base: float = 0.25  # seconds
    backoff_cap: float = 10.0  # seconds
    ssl_context: ssl.SSLContext | None = None  # for amqps; None: from the URL's query, else the system's CAs
    name: str = "relay"  # shown by the broker's management


class Broker:
    """Keeps one `Link` alive. Lanes take it from `link` and hold it for one batch at most."""

    def __init__(
        self, config: BrokerConfig, logger: Logger | None = None, observer: PublishObserver | None = None
    ) -> None:
        self._config = config
        self._observer = observer or Silent()
        self._backoff = Backoff(config.backoff_base, config.backoff_cap)
        self._address = _address(config.url)
        self._log = logger or Logger()
        self._outage = Outage(self._log, BROKER_UNAVAILABLE, BROKER_CONNECTED)
        self._link: Link | None = None
        self._ready = asyncio.Event()
        self._problem = "not connected yet"
        self._said_blocked = False
        self._keeper: asyncio.Task[None] | None = None

    @property
    def link(self) -> Link | None:
        """The connection, unless it is lost."""
        return self._link if self._link is not None and not self._link.lost.done() else None

    @property
    def connected(self) -> bool:
        """Whether the connection is open, blocked or not."""
        return self.link is not None

    @property
    def blocked(self) -> bool:
        """Whether the broker said that it takes no publishes."""
        return self.link is not None and self.link.blocked is not None

    def problem(self) -> str | None:
        """Why nothing can be published now, for people; None when it can."""
        link = self._link
        if link is None:
            return self._problem
        if link.lost.done():
            return link.lost.result()
        return None if link.blocked is None else f"blocked by the broker: {link.blocked}"

    async def start(self) -> None:
        """Connect in the background; does not wait and does not raise when the broker is away."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="relay-broker")

    async def ready(self, timeout: float) -> None:
        """Wait until a publish can be expected to be confirmed.

        Raises:
            BrokerUnavailable: not so within `timeout` seconds; the text says why.
            Exception: whatever ended the task that keeps the connection, once; the task is started again, so
                the loop counts the error and goes on.
        """
        if self._keeper is not None and self._keeper.done():
            ended, self._keeper = self._keeper, None
            await self.start()
            ended.result()
        if self.problem() is not None:
            self._ready.clear()  # lost within this turn of the loop: its callback has not run yet
        try:
            async with asyncio.timeout(timeout):
                await self._ready.wait()
        except TimeoutError:
            raise BrokerUnavailable(self.problem() or "not ready") from None

    async def close(self, timeout: float) -> None:
        """Close for good within `timeout` seconds, even when the broker is frozen. Safe to repeat."""
        deadline = asyncio.get_running_loop().time() + timeout
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper}, timeout=timeout)
            if keeper.done() and not keeper.cancelled():
                keeper.exception()  # nobody asks `ready` any more
        link, self._link = self._link, None
        self._ready.clear()
        self._problem = "closed"
        if link is not None:
            await link.close(max(0.0, deadline - asyncio.get_running_loop().time()))

    async def _keep(self) -> None:
        """Connect, wait until the connection is lost, connect again; for ever."""
        while True:
            try:
                link = await self._establish()
            except WireError as error:
                self._problem = str(error)
                self._outage.failed(error, broker=self._address)
                await asyncio.sleep(self._backoff.next())
                continue
            self._backoff.reset()
            self._up(link)
            why = await asyncio.shield(link.lost)
            self._down(why)
            await link.close(_GOODBYE_SECONDS)
            await asyncio.sleep(self._backoff.next())

    async def _establish(self) -> Link:
        """Open a connection and make sure that it is good for something.

        Raises:
            WireError: unreachable, refused, silent, or the exchange is not as it must be.
        """
        config = self._config
        link = await connect(
            config.url,
            name=config.name,
            heartbeat=config.heartbeat,
            timeout=config.connect_timeout,
            ssl_context=config.ssl_context,
            on_blocked=self._on_blocked,
        )
        good = False
        try:
            deadline = link.loop.time() + config.connect_timeout
            channel = await link.open_channel(deadline)
            await self._check_exchange(channel, deadline)
            await link.probe(channel, deadline)
            good = True
        finally:
            if not good:
                await link.close(_GOODBYE_SECONDS)
        return link

    async def _check_exchange(self, channel: ConfirmChannel, deadline: float) -> None:
        """Declare the configured exchange, or look whether it exists when that is not ours to do.

        Raises:
            Misconfigured: with the broker's own words and what to change.
        """
        config = self._config
        if not config.exchange:
            return
        passive = not config.declare_exchange or config.exchange.startswith("amq.")  # "amq." is the broker's
        try:
            declare = commands.Exchange.Declare(
                exchange=config.exchange, exchange_type=config.exchange_type, durable=True, passive=passive
            )
            await channel.call(declare, commands.Exchange.DeclareOk, deadline)
        except ChannelClosed as error:
            if passive:
                hint = "it must exist, for declaring it is turned off"
            elif error.code == 406:
                hint = f"it exists and is not a durable {config.exchange_type} exchange"
            else:
                hint = "grant the user 'configure' on it, or create it and turn declaring it off"
            raise Misconfigured(f"exchange {config.exchange!r}: {hint} ({error.text})") from None
        except ValueError as error:  # pamqp's own check of the name, narrower than the broker's
            raise Misconfigured(f"exchange {config.exchange!r}: {error}") from None

    def _up(self, link: Link) -> None:
        self._link = link
        if not self._outage.lasting:
            self._log.emit(BROKER_CONNECTED, broker=self._address)
        self._outage.worked(broker=self._address)
        self._observer.broker_connected(True)
        self._on_blocked(link.blocked)

    def _down(self, why: str) -> None:
        self._ready.clear()
        self._link, self._problem = None, why
        self._outage.failed(LinkLost(why), broker=self._address)
        self._observer.broker_connected(False)
        if self._said_blocked:
            self._said_blocked = False
            self._observer.broker_blocked(False)  # the next connection asks again

    def _on_blocked(self, reason: str | None) -> None:
        """Called by the link on Blocked and Unblocked, and once for a new link."""
        if self.link is None:
            return  # still being opened: `_up` asks again
        if reason is not None:
            self._ready.clear()
            self._log.emit(BROKER_BLOCKED, reason=reason)
            self._observer.broker_blocked(True)
        elif not self._ready.is_set():
            if self._said_blocked:
                self._log.emit(BROKER_UNBLOCKED)
                self._observer.broker_blocked(False)
            self._ready.set()
        self._said_blocked = reason is not None


def _address(url: str) -> str:
    """Host and port for the log, without user and password."""
    parts = URL(url)
    return f"{parts.host}:{parts.port or (5671 if parts.scheme == 'amqps' else 5672)}"
