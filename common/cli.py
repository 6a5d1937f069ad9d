"""The manners of every command of both command lines, apart from the daemons themselves.

Results go to standard output, everything else to standard error. What writes says first what it will touch and
needs ``--yes`` or an answer. Writes go in batches, one transaction each: whatever ends a command, whole batches are
written and nothing else. An expected error is one line and no traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import date, datetime
from typing import Any
from uuid import UUID

import asyncpg

from common.database import connect_arguments
from common.entry import secrets
from common.errors import DATABASE_ERRORS, RelayDrainError, SchemaMismatch
from common.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SCHEMA, EXIT_SETTINGS
from common.explain import describe_error
from common.logs import configure
from common.progress import Progress
from common.schema import check_revision, read_revision
from common.settings import SharedSettings, Source
from common.text import number, rows, table

EXIT_REFUSED = EXIT_SETTINGS
EXIT_CODES = (
    "exit codes: 0 done; 1 failed, declined, or a check says FAIL; 2 wrong use, refused settings, or a write without\n"
    "--yes and without a terminal to ask on; 3 the schema does not fit; 130 interrupted, whole batches are written"
)
SLOW_SECONDS = 300.0
"""For one statement of a command that may read a whole table; a daemon's own limit would be too short."""
LOCK_SECONDS = 5
"""A write waits so long for a row that another session holds."""
TABLE_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""

Step = Callable[[asyncpg.Connection], Awaitable[tuple[int, bool]]]
"""Writes one batch within the given transaction; returns the rows written, and whether more may come."""


class CommandFailed(RelayDrainError):
    """The command can not do what it was asked; the text is all that is printed."""

    code = EXIT_FAILED


class CommandRefused(CommandFailed):
    """It was asked in a way that it must not follow."""

    code = EXIT_REFUSED


class Interrupted(CommandFailed):
    """Ctrl-C: what was written stays written, in whole batches."""

    code = EXIT_INTERRUPTED


class Command:
    """One run of one command: its output, its question, its connection, and what Ctrl-C does."""

    def __init__(self, shared: SharedSettings, name: str) -> None:
        self.shared = shared
        self.schema = shared.database_schema
        self.name = name
        self._task = asyncio.current_task()
        self._interrupted = False
        self._in_batch = False

    def say(self, *lines: str) -> None:
        """Print results."""
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def note(self, *lines: str) -> None:
        """Print on standard error."""
        for line in lines:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def show(self, head: Sequence[str], body: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
        """Print a table that fits the terminal."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else TABLE_WIDTH
        self.say(*table(head, body, right, width))

    def show_json(self, value: Any, indent: int | None = 2) -> None:
        """Print a value as JSON: times in ISO 8601, UUIDs as text, bytes as hex."""
        self.say(json.dumps(value, indent=indent, default=_as_json, ensure_ascii=False))

    @contextlib.asynccontextmanager
    async def database(self, slow: bool = True) -> AsyncIterator[asyncpg.Connection]:
        """Open a connection whose schema fits; cut it after any error.

        Raises:
            SchemaMismatch: the schema does not fit.
            OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError: the database refused.
        """
        arguments = connect_arguments(self.shared, self.name)
        if slow:
            arguments["command_timeout"] = max(SLOW_SECONDS, arguments["command_timeout"])
        connection = await asyncpg.connect(**arguments)
        try:
            check_revision(await read_revision(connection, self.schema), self.schema)
            yield connection
        except BaseException:
            connection.terminate()
            raise
        with contextlib.suppress(*DATABASE_ERRORS):
            await connection.close(timeout=self.shared.database_connect_timeout)

    async def confirm(self, question: str, yes: bool) -> None:
        """Go on only when told so.

        Raises:
            CommandRefused: there is nobody to ask.
            CommandFailed: the answer was not yes.
        """
        if yes:
            return
        if sys.stdin is None or not sys.stdin.isatty():
            raise CommandRefused(
                "nothing was changed: standard input is no terminal to ask on; give --yes to go on"
            )
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        loop, typed = asyncio.get_running_loop(), asyncio.Event()
        # A blocking read would keep Ctrl-C from the loop.
        loop.add_reader(sys.stdin.fileno(), typed.set)
        try:
            await typed.wait()
        finally:
            loop.remove_reader(sys.stdin.fileno())
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise CommandFailed("nothing was changed")

    async def write(self, verb: str, total: int, step: Step, rate: float | None = None) -> int:
        """Run ``step`` in one transaction after another until nothing more comes; return the rows written.

        Args:
            verb: past participle for the progress: "released".
            total: rows that are expected.
            rate: rows in a second at most.

        Raises:
            Interrupted: Ctrl-C; the batch that was running is written whole, and the text says how many are.
            CommandFailed: the database refused; the text says how many rows are written.
        """
        progress = Progress(verb, total)
        began, written, more = time.monotonic(), 0, True
        try:
            async with self.database() as connection:
                while more and not self._interrupted:
                    with self._batch():
                        async with connection.transaction():
                            await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
                            count, more = await step(connection)
                    written += count
                    progress.show(written)
                    if rate is not None and more and not self._interrupted:
                        await asyncio.sleep(max(0.0, began + written / rate - time.monotonic()))
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
        except DATABASE_ERRORS as error:
            raise CommandFailed(
                f"{describe_error(error)}; {rows(written)} {verb} before that (a batch whose commit was not answered "
                "may be written too); the command can be run again"
            ) from error
        finally:
            progress.end()
        if self._interrupted and (more or written < total):
            raise Interrupted(
                f"interrupted: {number(written)} of {rows(total)} {verb}; run it again for the rest"
            )
        return written

    @contextlib.contextmanager
    def _batch(self) -> Iterator[None]:
        self._in_batch = True
        try:
            yield
        finally:
            self._in_batch = False

    def interrupt(self) -> None:
        """Ctrl-C: a batch is finished first; a second one does not wait."""
        if self._task is not None and (self._interrupted or not self._in_batch):
            self._task.cancel()
        self._interrupted = True

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._interrupted


def settings_refused(error: Exception) -> int:
    """Say why a command can not begin."""
    sys.stderr.write(f"settings refused: {error}\n")
    return EXIT_REFUSED


def run_command(
    name: str, shared: SharedSettings, own: Source, main: Callable[[Command], Coroutine[Any, Any, int]]
) -> int:
    """Run one command to its exit code: errors are one line, Ctrl-C is 130, a closed pipe is silent."""
    configure("error", shared.log_format, secrets(shared, own))
    try:
        return asyncio.run(_run(name, shared, main))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `relay quarantine list | head`: the rest of the output has no reader, nor has the interpreter's flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


async def _run(name: str, shared: SharedSettings, main: Callable[[Command], Coroutine[Any, Any, int]]) -> int:
    command = Command(shared, name)
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, command.interrupt)
    try:
        return await main(command)
    except asyncio.CancelledError:
        if not command.interrupted:
            raise
        command.note("interrupted")
        return EXIT_INTERRUPTED
    except CommandFailed as error:
        command.note(str(error))
        return error.code
    except SchemaMismatch as error:
        command.note(str(error))
        return EXIT_SCHEMA
    except BrokenPipeError:
        raise
    except (*DATABASE_ERRORS, RelayDrainError) as error:
        command.note(describe_error(error))
        return EXIT_FAILED


async def watch(command: Command, seconds: float, look: Callable[[], Awaitable[None]]) -> int:
    """Look again and again until Ctrl-C; a database that is away is said and waited for."""
    while True:
        if sys.stdout.isatty():
            command.say("\x1b[H\x1b[2J", "")
        try:
            await look()
        except BrokenPipeError:
            raise
        except DATABASE_ERRORS as error:
            command.note(describe_error(error))
        await asyncio.sleep(seconds)


def add_write_options(parser: argparse.ArgumentParser, batch: int = 1000) -> None:
    """Give a command that writes the options of all of them."""
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--batch",
        type=_batch_size,
        default=batch,
        metavar="ROWS",
        help=f"rows of one transaction (default {batch})",
    )


def _batch_size(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 50_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows from 1 to 50000")
    return value


def _as_json(value: Any) -> Any:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} is not JSON")
