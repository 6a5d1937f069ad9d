"""Stock aioapns in a bare loop: no database, no deadlines, no retries. Run as a process of its own by the benchmark.

Reads a number of pushes from each line of stdin, sends them, and prints one JSON line. Only the address is not
aioapns' own: it is fixed in its protocol class.
"""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvloop
from aioapns import APNs, NotificationRequest, PushType
from aioapns.connection import APNsProductionClientProtocol


async def main() -> None:
    """Serve the lines of stdin until it ends."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    APNsProductionClientProtocol.APNS_SERVER = told["host"]
    APNsProductionClientProtocol.APNS_PORT = told["port"]
    context = ssl.create_default_context(cafile=told["ca_file"])
    context.set_alpn_protocols(["h2"])
    apns = APNs(
        key=Path(told["key_file"]).read_text(),
        key_id=told["key_id"],
        team_id=told["team_id"],
        topic=told["topic"],
        max_connections=told["connections"],
        ssl_context=context,
    )
    payload = json.loads(told["payload"])

    async def sender(devices: list[str]) -> int:
        accepted = 0
        while devices:
            answer = await apns.send_notification(
                NotificationRequest(
                    device_token=devices.pop(),
                    message=payload,
                    notification_id=str(uuid4()),
                    priority=10,
                    push_type=PushType.ALERT,
                )
            )
            accepted += answer.is_successful
        return accepted

    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        count = int(line)
        devices = [f"{number:064x}" for number in range(count)]
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        accepted = sum(await asyncio.gather(*(sender(devices) for _ in range(told["in_flight"]))))
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps({"accepted": accepted, "seconds": seconds, "cpu": cpu}), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
