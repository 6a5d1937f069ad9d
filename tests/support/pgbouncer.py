"""A pgbouncer in transaction mode in front of a test's database, with fewer sessions than it has clients."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator

from deploy.local.ports import free_port
from deploy.local.processes import (
    Child,
    StartFailed,
    last_lines,
    private_directory,
    remove_directory,
    unprivileged_user,
    wait_until,
)

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
MISSING = "NO PGBOUNCER ON THIS MACHINE (apt-get install pgbouncer): transaction mode is not tested"


@contextlib.contextmanager
def transaction_pooler(postgres_port: int, *, sessions: int) -> Iterator[int]:
    """Run pgbouncer until the block ends; yield its port. ``sessions`` on the server are shared by all clients."""
    if PROGRAM is None:
        raise StartFailed(MISSING)
    user = unprivileged_user()  # pgbouncer refuses to run as root
    directory = private_directory("rd-pgb-", user)
    port = free_port()
    configuration = directory / "pgbouncer.ini"
    configuration.write_text(
        f"""[databases]
* = host=127.0.0.1 port={postgres_port} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {sessions}
max_client_conn = 200
logfile = {directory}/log
""",
        encoding="utf-8",
    )
    child = Child([PROGRAM, str(configuration)], cwd=directory, user=user)
    try:
        if not wait_until(lambda: not child.alive or _connects(port), 20) or not child.alive:
            raise StartFailed(f"pgbouncer did not start:\n{last_lines(directory / 'log')}")
        yield port
    finally:
        child.kill()
        remove_directory(directory)


def _connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
