"""``python -m deploy.local``: keep servers for many runs of pytest, until Ctrl-C or SIGTERM.

Prints a line for the shell in which the tests are run: ``eval`` it, or copy it.
"""

from __future__ import annotations

import signal
import sys

from deploy.local.host import VARIABLE, ServerHost, Servers


def main() -> int:
    """Start the servers, print their address, wait."""
    stop = {signal.SIGINT, signal.SIGTERM}
    host = ServerHost()
    try:
        servers = Servers(host.address)
        servers.postgres()
        servers.rabbit()
        print(f"export {VARIABLE}={host.address}", flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # not before: the servers would inherit the mask
        signal.sigwait(stop)
    finally:
        host.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
