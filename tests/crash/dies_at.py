"""A relay that kills itself (SIGKILL) when its first batch with rows reaches a stage: ``-m tests.crash.dies_at STAGE``.

Stages are those of relay/loop.py: publish (claimed, nothing sent), mark (published, nothing written), commit (written,
not committed), committed (all done, nothing said).
"""

import os
import signal
import sys

from relay import daemon, loop
from relay.cli.main import main

STAGE = sys.argv[1]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(loop.Lane):
    """A lane that does not live to see a stage."""

    def at(self, stage):
        super().at(stage)
        if stage == STAGE:
            die()

    def committed(self, *arguments):
        if STAGE == "committed":
            die()
        super().committed(*arguments)


daemon.Lane = Dying

if __name__ == "__main__":
    sys.exit(main(["run"]))
