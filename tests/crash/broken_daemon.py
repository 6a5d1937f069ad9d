"""Entry points with one thing broken, run in place of ``python -m relay run`` or ``python -m drain run``.

``python -m tests.crash.broken_daemon FAULT DAEMON``: ``blocked-loop`` blocks the event loop after the start,
``dead-task`` lets an inner task end, ``slow-clock`` sets the wall clock of this process ten minutes back.
"""

import asyncio
import sys
import time

from common import observer


def blocked_loop() -> None:
    async def block(self) -> None:
        await asyncio.sleep(0.5)
        time.sleep(3600)

    observer.Observer.run = block


def dead_task() -> None:
    async def end(self) -> None:
        await asyncio.sleep(0.5)
        raise RuntimeError("broken on purpose")

    observer.Observer.run = end


def slow_clock() -> None:
    real = time.time
    time.time = lambda: real() - 600.0


if __name__ == "__main__":
    {"blocked-loop": blocked_loop, "dead-task": dead_task, "slow-clock": slow_clock}[sys.argv[1]]()
    if sys.argv[2] == "relay":
        from relay.cli.main import main
    else:
        from drain.cli.main import main
    sys.exit(main(["run"]))
