"""What ``relay check`` looks at: everything that the daemon needs. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
from pamqp import commands as amqp

from common.checks import Check, Privilege, database_checks, settings_check
from common.database import connect_arguments
from common.errors import DATABASE_ERRORS, ConfigurationError
from common.explain import address, describe_error
from common.schema import quote_identifier, wakeup_channel
from common.settings import unknown_variables
from relay import admin_sql
from relay.broker import BrokerConfig
from relay.daemon import broker_config
from relay.settings import RelaySettings, Settings
from relay.wire import ChannelClosed, Link, WireError, connect

NAME = "relay-check"
NOTIFY_SECONDS = 2.0
_HINTS = (
    ("ACCESS_REFUSED", "check user and password in RELAY_AMQP_URL"),
    ("AuthenticationError", "check user and password in RELAY_AMQP_URL"),
    ("NOT_ALLOWED", "check the vhost in RELAY_AMQP_URL and the user's permissions on it"),
    ("NotAllowed", "check the vhost in RELAY_AMQP_URL and the user's permissions on it"),
    ("CERTIFICATE", "check RELAY_AMQP_CA_FILE and the broker's certificate"),
    ("SSL", "is it the port of amqps (5671)?"),
    ("111", "is it running, and is the port right?"),
    ("refused", "is it running, and is the port right?"),
    ("gaierror", "check the host in RELAY_AMQP_URL"),
    ("no answer", "a firewall, or not a broker at this port?"),
)


async def checks(settings: Settings) -> AsyncIterator[Check]:
    """Every check, in the order in which the daemon needs things."""
    yield settings_check(unknown_variables("RELAY_", RelaySettings))
    reached = False
    async for check in database_checks(settings.shared, NAME, privileges(settings.relay)):
        reached = reached or (check.name == "database" and check.state == "ok")
        yield check
    if reached:
        yield await wakeup_check(settings)
    async for check in broker_checks(settings.relay):
        yield check


def privileges(relay: RelaySettings) -> list[Privilege]:
    """What relay does to the tables. FOR UPDATE needs UPDATE, also where rows are only deleted."""
    marks = ("published_at", "attempts", "next_attempt_at", "last_error", "quarantined_at")
    needed = [Privilege("outbox", "SELECT"), Privilege("outbox", "UPDATE", marks)]
    if relay.retention_days >= 0:
        needed.append(Privilege("outbox", "DELETE"))
    if relay.inbox_retention_days >= 0:
        needed += [
            Privilege("inbox", "SELECT"),
            Privilege("inbox", "UPDATE", ("received_at",)),
            Privilege("inbox", "DELETE"),
        ]
    return needed


async def wakeup_check(settings: Settings) -> Check:
    """The trigger and RELAY_WAKEUP go together, and a notification arrives. It costs the relays one look."""
    shared, relay = settings.shared, settings.relay
    schema, channel = quote_identifier(shared.database_schema), wakeup_channel(shared.database_schema)
    listening = connect_arguments(shared, NAME)
    if relay.listen_url is not None:
        listening["dsn"] = relay.listen_url.get_secret_value()
    arrived = asyncio.Event()
    connections: list[asyncpg.Connection] = []
    try:
        connections.append(await asyncpg.connect(**connect_arguments(shared, NAME)))
        fires = await connections[0].fetchval(admin_sql.WAKEUP_TRIGGER, f"{schema}.outbox")
        if not relay.wakeup:
            if not fires:
                return Check("wake-up", "ok", "off")
            return Check(
                "wake-up",
                "warn",
                "producers notify and RELAY_WAKEUP is off",
                "turn it on, or drop the trigger: python -m migrations wakeup disable",
            )
        if not fires:
            return Check(
                "wake-up",
                "FAIL",
                "RELAY_WAKEUP is on and the trigger is missing or disabled",
                "python -m migrations wakeup enable",
            )
        connections.append(await asyncpg.connect(**listening))
        await connections[1].add_listener(channel, lambda *_: arrived.set())
        await connections[0].execute("SELECT pg_notify($1, '')", channel)
        async with asyncio.timeout(NOTIFY_SECONDS):
            await arrived.wait()
    except TimeoutError:
        return Check(
            "wake-up",
            "FAIL",
            f"no notification within {NOTIFY_SECONDS:g} s",
            "LISTEN does not pass a pooler in transaction mode: set RELAY_LISTEN_URL",
        )
    except DATABASE_ERRORS as error:
        return Check("wake-up", "FAIL", describe_error(error))
    finally:
        for connection in connections:
            connection.terminate()
    return Check("wake-up", "ok", f"a notification on {channel} arrives")


async def broker_checks(relay: RelaySettings) -> AsyncIterator[Check]:
    """Connect as the daemon does, look at the exchange, and ask whether the broker takes publishes."""
    where = address(relay.amqp_url.get_secret_value())
    try:
        config = broker_config(relay)
        link = await connect(
            config.url,
            name=NAME,
            heartbeat=config.heartbeat,
            timeout=config.connect_timeout,
            ssl_context=config.ssl_context,
            on_blocked=lambda _: None,
        )
    except (WireError, ConfigurationError) as error:
        hint = next((hint for part, hint in _HINTS if part in str(error)), "")
        yield Check("broker", "FAIL", f"{where}: {error}", hint)
        return
    try:
        tls = "TLS" if config.url.startswith("amqps://") else "not encrypted"
        yield Check("broker", "ok", f"{where}, {tls}")
        yield await exchange_check(link, config)
        yield await blocked_check(link, config)
    finally:
        await link.close(1.0)


async def exchange_check(link: Link, config: BrokerConfig) -> Check:
    """Whether the configured exchange is there, and is what the daemon would declare. Declares none that is missing."""
    name = config.exchange
    declares = config.declare_exchange and not name.startswith("amq.")
    try:
        await declare(link, config, passive=True)
        if declares:
            await declare(link, config, passive=False)  # it is there: this only compares
    except ChannelClosed as error:
        if error.code == 404 and declares:
            return Check(
                "exchange",
                "ok",
                f"{name!r} is not there yet: relay declares it (durable {config.exchange_type})",
            )
        hint = {
            404: "create it, or set RELAY_DECLARE_EXCHANGE=true",
            403: "grant the user the permission, or create it and set RELAY_DECLARE_EXCHANGE=false",
            406: f"it is no durable {config.exchange_type} exchange; RELAY_DECLARE_EXCHANGE=false takes it as it is",
        }
        return Check("exchange", "FAIL", f"{name!r}: {error.text}", hint.get(error.code, ""))
    except (WireError, ValueError) as error:
        return Check("exchange", "FAIL", f"{name!r}: {error}")
    return Check("exchange", "ok", f"{name!r} is there")


async def declare(link: Link, config: BrokerConfig, passive: bool) -> None:
    """Declare the exchange, or ask whether it exists, on a channel of its own.

    Raises:
        ChannelClosed: the broker says no, and why.
        WireError: no answer.
    """
    deadline = link.loop.time() + config.connect_timeout
    channel = await link.open_channel(deadline)
    request = amqp.Exchange.Declare(
        exchange=config.exchange, exchange_type=config.exchange_type, durable=True, passive=passive
    )
    await channel.call(request, amqp.Exchange.DeclareOk, deadline)
    channel.abandon("done")


async def blocked_check(link: Link, config: BrokerConfig) -> Check:
    """Whether an alarm keeps the broker from taking publishes."""
    deadline = link.loop.time() + config.connect_timeout
    try:
        await link.probe(await link.open_channel(deadline), deadline)
    except WireError as error:
        return Check("publishing", "FAIL", str(error))
    if link.blocked is not None:
        return Check(
            "publishing",
            "FAIL",
            f"blocked by the broker: {link.blocked}",
            "free its memory or disk; relay waits",
        )
    return Check("publishing", "ok", "the broker takes publishes")
