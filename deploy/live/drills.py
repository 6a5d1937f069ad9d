"""The three traces of the design, played on the running chain and told with the figures that were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import psycopg

from deploy.live.drain_drills import drain_crash, zombie
from deploy.live.drill import Drill, NotAsPromised
from deploy.live.figures import Sampler
from deploy.live.relay_drill import relay_crash
from deploy.live.signals import Interrupted, Signals
from deploy.live.stack import Stack
from deploy.local.processes import StartFailed
from deploy.simulator.client import SimulatorError

TRACES: Mapping[str, Callable[[Drill], None]] = {
    "relay-crash": relay_crash,
    "drain-crash": drain_crash,
    "zombie": zombie,
}


def play(name: str, stack: Stack, sampler: Sampler, signals: Signals, say: Callable[[str], None]) -> bool:
    """Play one trace; say whether every figure was as promised."""
    drill = Drill(stack, sampler, signals, say)
    trace = TRACES[name]
    try:
        say(f"drill {name}: {(trace.__doc__ or '').splitlines()[0]}")
        drill.quiet()
        trace(drill)
    except (NotAsPromised, StartFailed, SimulatorError, psycopg.Error, OSError) as error:
        drill.good = False
        drill.tell(f"NOT AS PROMISED: {error}")
    except Interrupted:
        drill.good = False
        drill.tell("the drill was not played to its end")
    say(f"drill {name}: {'all figures as promised' if drill.good else 'FAILED'}")
    return drill.good
