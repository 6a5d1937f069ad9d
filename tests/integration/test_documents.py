"""What stands in the documents as code is run as it stands: SQL, Python, and the commands of a shell."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from deploy.local.installations import wheel_binaries
from deploy.local.supervise import clean_environment
from tests.support.broker import Broker
from tests.support.database import Database
from tests.support.documents import ROOT, Block, all_blocks
from tests.support.processes import RelayFactory, Simulator

ORDERS = "CREATE TABLE orders (id bigint PRIMARY KEY, customer text NOT NULL, cents integer NOT NULL)"
"""The application's own table, which the examples write to."""
BLOCKS = all_blocks()
PYTHON = {block.info: block for block in BLOCKS if block.language == "python" and block.info}


def chosen(language: str, info: str) -> list[Any]:
    found = [block for block in BLOCKS if (block.language, block.info) == (language, info)]
    assert found, f"no block of {language} {info}"
    return [pytest.param(block, id=block.where) for block in found]


def documents_with(language: str, info: str) -> list[str]:
    return sorted({block.document for block in BLOCKS if (block.language, block.info) == (language, info)})


@pytest.fixture
def shop(database: Database) -> Database:
    """The test's database with the application's table."""
    database.run(ORDERS)
    return database


def module(name: str) -> ModuleType:
    """The Python example of this name as a module."""
    made = ModuleType(name)
    exec(compile(PYTHON[name].text, f"{PYTHON[name].where} ({name})", "exec"), made.__dict__)
    return made


def events(database: Database) -> list[dict[str, Any]]:
    return database.run(
        "SELECT aggregate_type, aggregate_id, event_type, payload, ordering_key FROM relay_drain.outbox ORDER BY id"
    )


def check_order(database: Database, ordering_key: str | None) -> None:
    """One order and its one event."""
    assert database.run("SELECT * FROM orders") == [{"id": 7, "customer": "c-1", "cents": 1990}]
    assert events(database) == [
        {
            "aggregate_type": "order",
            "aggregate_id": "7",
            "event_type": "order.placed",
            "payload": {"order_id": 7, "cents": 1990},
            "ordering_key": ordering_key,
        }
    ]


# ------------------------------------------------------------------------------------------------------------------ SQL


@pytest.mark.parametrize("document", documents_with("sql", "run"))
def test_the_sql_of_a_document_runs_in_its_order(shop: Database, document: str) -> None:
    for block in BLOCKS:
        if (block.document, block.language, block.info) == (document, "sql", "run"):
            shop.run(block.text)


def test_every_named_argument_in_every_language_is_one_of_the_function(database: Database) -> None:
    rows = database.run(
        "SELECT proname, proargnames FROM pg_proc WHERE pronamespace = 'relay_drain'::regnamespace "
        "AND proargnames IS NOT NULL"
    )
    functions = {row["proname"]: set(row["proargnames"]) for row in rows}
    seen = 0
    for block in BLOCKS:
        for call in re.finditer(
            r"relay_drain\.(\w+)\(((?:[^;`]|=>)*?)(?=relay_drain\.|;|`|\Z)", block.text, re.DOTALL
        ):
            arguments = set(re.findall(r"\b([a-z_]+)\s*=>", call[2]))
            if call[1] in functions:
                seen += len(arguments)
                assert arguments <= functions[call[1]], f"{block.where}: {arguments - functions[call[1]]}"
    assert seen > 50


def test_the_tables_of_arguments_are_the_functions(database: Database) -> None:
    text = (ROOT / "docs" / "integrate.md").read_text(encoding="utf-8")
    for function in ("enqueue_event", "enqueue_delivery"):
        table = text.partition(f"\n| `{function}` | default")[2].partition("\n\n")[0]
        named = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:])))
        arguments = database.value(
            "SELECT proargnames FROM pg_proc WHERE pronamespace = 'relay_drain'::regnamespace AND proname = %s",
            [function],
        )
        required = {"aggregate_type", "aggregate_id", "event_type", "app", "device_token"}
        assert named - {"payload"} == set(arguments) - required - {"payload"}, function


# --------------------------------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize("name", ["asyncpg_order", "readme_order"])
async def test_the_example_for_asyncpg_writes_an_order_and_its_event(shop: Database, name: str) -> None:
    async with shop.session() as connection:
        await module(name).place_order(connection, 7, "c-1", 1990)
    check_order(shop, "customer-c-1" if name == "asyncpg_order" else None)


async def test_an_order_that_fails_leaves_no_event(shop: Database) -> None:
    async with shop.session() as connection:
        place_order = module("asyncpg_order").place_order
        await place_order(connection, 7, "c-1", 1990)
        with pytest.raises(Exception, match="orders_pkey"):
            await place_order(connection, 7, "c-1", 1990)
    check_order(shop, "customer-c-1")


def test_the_example_for_psycopg_writes_an_order_and_its_event(shop: Database) -> None:
    with psycopg.connect(shop.url) as connection:
        module("psycopg_order").place_order(connection, 7, "c-1", 1990)
    check_order(shop, "customer-c-1")


def test_the_example_for_sqlalchemy_writes_an_order_and_its_event(shop: Database) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(shop.url.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin():
        module("sqlalchemy_order").place_order(session, 7, "c-1", 1990)
    engine.dispose()
    check_order(shop, "customer-c-1")


DJANGO = """
import os, django
from django.conf import settings
from urllib.parse import urlsplit
url = urlsplit(os.environ["DATABASE_URL"])
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": url.path[1:],
    "USER": url.username, "HOST": url.hostname, "PORT": url.port}})
django.setup()
{example}
place_order(7, "c-1", 1990)
"""


def test_the_example_for_django_writes_an_order_and_its_event(shop: Database, tmp_path: Path) -> None:
    pytest.importorskip("django", reason="Django is not installed: its example is not run")
    program = tmp_path / "example.py"
    program.write_text(DJANGO.replace("{example}", PYTHON["django_order"].text), encoding="utf-8")
    run([sys.executable, str(program)], tmp_path, {"DATABASE_URL": shop.url})
    check_order(shop, "customer-c-1")


async def test_the_example_of_a_consumer_applies_an_event_once(database: Database, broker: Broker) -> None:
    example = module("aio_pika_consumer")
    event_id = str(uuid4())
    stop = asyncio.Event()
    async with database.pool() as pool:
        consumer = asyncio.create_task(example.consume(broker.url, pool, stop))
        try:
            async with asyncio.timeout(10):
                while "notifications" not in await queues(broker):
                    await asyncio.sleep(0.05)
            for _ in range(2):
                await broker.publish(b'{"order_id": 7}', "order.placed", message_id=event_id)
            await broker.publish(b"not JSON", "order.placed", message_id=str(uuid4()))
            await broker.publish(b'{"order_id": 8}', "order.placed", message_id=str(uuid4()))
            await database.until("SELECT count(*) = 2 FROM {schema}.notification_deliveries")
            async with asyncio.timeout(10):
                while broker.depth("notifications"):
                    await asyncio.sleep(0.05)
        finally:
            stop.set()
            await consumer
    rows = database.run("SELECT collapse_id, event_id FROM relay_drain.notification_deliveries ORDER BY id")
    assert [row["collapse_id"] for row in rows] == ["order-7", "order-8"]
    assert str(rows[0]["event_id"]) == event_id
    assert database.value("SELECT count(*) FROM relay_drain.inbox") == 2


async def queues(broker: Broker) -> str:
    """Whether the consumer's queue is there and bound: the exchange takes a message for it."""
    try:
        await asyncio.to_thread(broker.depth, "notifications")
    except Exception:
        return ""
    return "notifications"


async def test_the_readmes_consumer_applies_an_event_once(database: Database) -> None:
    class Message:
        message_id = str(uuid4())
        acknowledged = 0

        async def ack(self) -> None:
            self.acknowledged += 1

    example, message = module("readme_consumer"), Message()
    example.__dict__["json"] = json
    async with database.session() as connection:
        await example.handle(connection, message)
        await example.handle(connection, message)
    assert message.acknowledged == 2
    assert database.value("SELECT count(*) FROM relay_drain.notification_deliveries") == 1


def test_every_python_example_is_run_by_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in PYTHON if f'"{name}"' not in source] == []


# ------------------------------------------------------------------------------------------------------ other languages


@pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed: its examples are not checked"
)
@pytest.mark.parametrize("block", chosen("js", "check"))
def test_the_examples_for_node_are_javascript(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "example.mjs"
    program.write_text(block.text, encoding="utf-8")
    run(["node", "--check", str(program)], tmp_path)


@pytest.mark.skipif(
    shutil.which("javac") is None, reason="javac is not installed: its example is not compiled"
)
def test_the_example_for_java_is_compiled(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if (block.language, block.info) == ("java", "Orders")]
    program = tmp_path / "Orders.java"
    program.write_text(block.text, encoding="utf-8")
    run(["javac", "-d", str(tmp_path), str(program)], tmp_path)


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("document", documents_with("sh", "run"))
def test_the_commands_of_a_document_run_in_its_order(
    document: str,
    database: Database,
    broker: Broker,
    simulator: Simulator,
    relay: RelayFactory,
    tmp_path: Path,
) -> None:
    """As a reader types them, one after the other, with a relay in another terminal."""
    database.run("DROP SCHEMA relay_drain CASCADE")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, argv in {
        "python": [sys.executable],
        "relay": [sys.executable, "-m", "relay"],
        "drain": [sys.executable, "-m", "drain"],
    }.items():
        program = bin_folder / name
        program.write_text("#!/bin/sh\nexec " + " ".join(argv) + ' "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    environment = {
        "DATABASE_URL": database.url,
        "RELAY_AMQP_URL": broker.url,
        "DRAIN_APPS": json.dumps({"shop": simulator.app()}),
        "SECRETS_DIR": os.devnull,
        "PROBE_PORT": "1",
        "PATH": os.pathsep.join([str(bin_folder), os.environ["PATH"], str(wheel_binaries())]),
    }
    started = False
    for block in BLOCKS:
        if block.document != document or block.language != "sh":
            continue
        if block.info == "run":
            run(["bash", "-euo", "pipefail", "-c", block.text], tmp_path, environment)
        elif block.text.strip() == "relay run" and not started:
            started = True
            daemon = relay(RELAY_MAX_ATTEMPTS=1)
            daemon.wait_for("row_quarantined")
    assert database.value("SELECT count(*) FROM relay_drain.outbox") > 0


def run(argv: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    """Run a program to its end; what it said is the message when it fails."""
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**clean_environment(), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"


# ------------------------------------------------------------------------------------------- what a document warns of

LIMITED = "SELECT id FROM q WHERE NOT done LIMIT 10 FOR UPDATE SKIP LOCKED"
SAFE: dict[str, str] = {
    "cte": f"WITH due AS MATERIALIZED ({LIMITED}) UPDATE q SET done = true FROM due WHERE q.id = due.id",
    "array": f"UPDATE q SET done = true WHERE id = ANY (ARRAY({LIMITED}))",
}


@pytest.fixture
def nested_loop(database: Database) -> Callable[[str], int]:
    """Runs an update on a table of 3,000 rows under the plan of stale statistics; returns how many rows it took."""
    database.run("CREATE TABLE q (id bigint PRIMARY KEY, done boolean NOT NULL DEFAULT false)")
    database.run("ANALYZE q")
    database.run("INSERT INTO q (id) SELECT * FROM generate_series(1, 3000)")

    def update(statement: str) -> int:
        with psycopg.connect(database.url) as connection:
            for way in ("hashjoin", "mergejoin", "hashagg", "material", "sort"):
                connection.execute(f"SET LOCAL enable_{way} = off")
            taken = connection.execute(statement).rowcount
            connection.rollback()
            return taken

    return update


def test_in_with_a_limit_takes_more_than_the_limit(nested_loop: Callable[[str], int]) -> None:
    """docs/claiming.md says so; it is why no statement of ours has this form."""
    (warned_of,) = [
        block.text
        for block in BLOCKS
        if block.document == "docs/claiming.md" and "WHERE id IN (" in block.text
    ]
    assert nested_loop(warned_of.strip().rstrip(";")) == 3000


@pytest.mark.parametrize("form", SAFE)
def test_the_safe_forms_take_the_limit(nested_loop: Callable[[str], int], form: str) -> None:
    assert nested_loop(SAFE[form]) == 10
