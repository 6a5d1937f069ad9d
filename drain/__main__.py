"""``drain``: the command line. ``drain run`` is the daemon."""

from __future__ import annotations

import sys

from drain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
