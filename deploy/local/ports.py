"""Free ports on loopback."""

from __future__ import annotations

import random
import socket

# Below the range that systems take for outgoing connections (32768 on Linux, 49152 elsewhere): a server that is
# killed and started again finds its port free.
_FIRST, _LAST = 20_000, 32_000
_random = random.SystemRandom()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listened on a moment ago."""
    for _ in range(200):
        port = _random.randrange(_FIRST, _LAST)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {_FIRST} and {_LAST}")
