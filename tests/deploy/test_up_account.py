"""The account's questions: each kind of loss is seen by the one that asks for it, and nothing else is called lost."""

from __future__ import annotations

import psycopg
import pytest

from common.schema import qualify
from deploy.demo.consumer import CONSUMER
from deploy.demo.producer import SHOP
from deploy.live import sql
from tests.support.database import SCHEMA, Database


@pytest.fixture
def shop(database: Database) -> Database:
    """A database with one order that went all the way."""
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(SHOP.read_bytes())
    order(database, 1)
    for statement in LOSSES:
        assert ask(database, statement) == []
    return database


LOSSES = (
    sql.ORDERS_WITHOUT_EVENT,
    sql.PUBLISHED_NOT_APPLIED,
    sql.APPLIED_WITHOUT_DELIVERY,
    sql.APPLIED_NOT_NOTIFIED,
    sql.APPLIED_TWICE,
)


def order(database: Database, customer: int) -> None:
    """An order with its event (published), its place in the inbox, its effect and its delivery."""
    database.run(
        f"""WITH placed AS (INSERT INTO shop.orders (customer_id, cents) VALUES (%s, 1) RETURNING id, customer_id),
            event AS (SELECT id, customer_id, {SCHEMA}.enqueue_event('order', id::text, 'order.placed', '{{}}')
                AS event_id FROM placed),
            notified AS (INSERT INTO shop.notified SELECT id, 1 FROM event)
        SELECT {SCHEMA}.accept_event(%s, e.event_id), {SCHEMA}.enqueue_delivery('shop', c.device_token, '{{}}',
            e.event_id) FROM event AS e JOIN shop.customers AS c ON c.id = e.customer_id""",
        [customer, CONSUMER],
    )
    database.run(f"UPDATE {SCHEMA}.outbox SET published_at = now()")


def ask(database: Database, statement: str) -> list[str]:
    with psycopg.connect(database.url) as connection:
        arguments = [CONSUMER] if "$1" in statement else None
        return [
            row[0] for row in psycopg.RawCursor(connection).execute(qualify(statement, SCHEMA), arguments)
        ]


@pytest.mark.parametrize(
    ("loss", "seen_by"),
    [
        (f"DELETE FROM {SCHEMA}.outbox", sql.ORDERS_WITHOUT_EVENT),
        (f"DELETE FROM {SCHEMA}.inbox", sql.PUBLISHED_NOT_APPLIED),
        (f"DELETE FROM {SCHEMA}.notification_deliveries", sql.APPLIED_WITHOUT_DELIVERY),
        ("DELETE FROM shop.notified", sql.APPLIED_NOT_NOTIFIED),
        ("UPDATE shop.notified SET times = 2", sql.APPLIED_TWICE),
    ],
)
def test_each_kind_of_loss_is_seen(shop: Database, loss: str, seen_by: str) -> None:
    shop.run(loss)
    assert {statement for statement in LOSSES if ask(shop, statement)} == {seen_by}


def test_order_of_a_customer_whose_device_is_dead_needs_no_delivery(shop: Database) -> None:
    shop.run(f"DELETE FROM {SCHEMA}.notification_deliveries")
    [(token,)] = [
        tuple(row.values()) for row in shop.run("SELECT device_token FROM shop.customers WHERE id = 1")
    ]
    shop.run(
        f"SELECT {SCHEMA}.accept_event(%s, {SCHEMA}.enqueue_event('device_token', %s, 'device_token.dead', '{{}}'))",
        [CONSUMER, token],
    )
    assert ask(shop, sql.APPLIED_WITHOUT_DELIVERY) == []
    shop.run(
        f"UPDATE {SCHEMA}.inbox SET received_at = received_at - interval '1 minute' WHERE event_id IN "
        f"(SELECT event_id FROM {SCHEMA}.outbox WHERE event_type = 'order.placed')"
    )
    assert len(ask(shop, sql.APPLIED_WITHOUT_DELIVERY)) == 1, "it was applied long before the device died"
