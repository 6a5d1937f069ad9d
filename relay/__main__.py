"""``relay``: the command line. ``relay run`` is the daemon."""

from __future__ import annotations

import sys

from relay.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
