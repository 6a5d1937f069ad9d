"""``drain``: the command line. ``drain run`` is the daemon."""

from __future__ import annotations

import os
import signal
import sys

if sys.argv[1:2] == ["run"]:
    # Until the loop takes signals over: a TERM while modules are imported ends the process with 0. As PID 1 it
    # would be ignored, and the platform would wait for its grace to be over.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

from drain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
