"""A relay with one inner fault, run in place of ``python -m relay run``: ``-m tests.crash.faulty FAULT``."""

import asyncio
import sys
import time

from common import lifecycle, observer, prune
from relay import daemon, loop, wakeup
from relay.cli.main import main


class Blocks(loop.Lane):
    """The first batch with rows blocks the event loop: a call that should have been awaited."""

    def committed(self, *arguments):
        super().committed(*arguments)
        time.sleep(60)


class Stalls(loop.Lane):
    """Every batch fails by a fault of ours."""

    async def relay_batch(self, source):
        raise ZeroDivisionError(f"of {source}")


async def dies(*_):
    await asyncio.sleep(0.3)
    raise RuntimeError("a fault of ours")


async def ends(*_):
    await asyncio.sleep(0.3)


def replace(owner, name, value):
    return lambda: setattr(owner, name, value)


FAULTS = {
    "blocks": replace(daemon, "Lane", Blocks),
    "stalls": replace(daemon, "Lane", Stalls),
    "lane-1": replace(loop.Lane, "run", dies),
    "lane-1-ends": replace(loop.Lane, "run", ends),
    "observer": replace(observer.Observer, "run", dies),
    "prune": replace(prune.Pruner, "run", dies),
    "wakeup": replace(wakeup.Wakeup, "run", ends),
    "loop-lag": replace(lifecycle.Lifecycle, "watch_loop_lag", dies),
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(main(["run"]))
