"""No secret and no device token in anything that the daemons print or export, whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

PASSWORD = "pa55-word-of-the-database"
AMQP_PASSWORD = "pa55-word-of-the-broker"
PROXY_PASSWORD = "pa55-word-of-the-proxy"


def exported(daemon) -> str:
    pages = [daemon.get(path)[1] for path in ("/metrics", "/livez", "/readyz", "/startupz", "/")]
    title = Path(f"/proc/{daemon.pid}/cmdline")
    pages.append(title.read_text() if title.exists() else "")
    return "\n".join([*pages, daemon.output, *(json.dumps(line) for line in daemon.lines)])


def with_password(url: str, password: str) -> str:
    scheme, rest = url.split("://")
    _, host = rest.rsplit("@", 1)
    return f"{scheme}://postgres:{password}@{host}"


async def test_drain_gives_away_no_token_key_or_password(database, simulator, drain):
    control = simulator.control
    await database.enqueue_deliveries(8)
    tokens = [
        row["device_token"]
        for row in await database.fetch("SELECT device_token FROM {schema}.notification_deliveries")
    ]
    control.unregister(tokens[0], since_ms=1)
    control.always("answer", device=tokens[1], reason="BadPath")
    control.always("answer", device=tokens[2], status=418, body="<html>no</html>")
    control.next_requests(1, "drop", device=tokens[3])
    control.next_requests(1, "answer", device=tokens[4], reason="ExpiredProviderToken")
    daemon = drain(
        DATABASE_URL=with_password(database.url, PASSWORD),
        DRAIN_RETRY_BASE=0.05,
        DRAIN_RETRY_CAP=0.1,
        LOG_LEVEL="debug",
    )
    await database.until(
        "SELECT count(*) = 0 FROM {schema}.notification_deliveries WHERE status IN ('pending', 'claimed')"
    )
    await asyncio.to_thread(database.terminate_sessions)
    control.always("answer", reason="InvalidProviderToken")
    await database.enqueue_deliveries(5, more="event_id => gen_random_uuid()")
    await daemon.seen("app_paused")
    text = exported(daemon)
    key = "".join(Path(simulator.key_file).read_text().splitlines()[1:-1])
    for secret in (*tokens, PASSWORD, key[:40], "bearer ey"):
        assert secret not in text, f"{secret[:12]}… was given away"
    assert daemon.stop() == 0
    assert PASSWORD not in json.dumps(daemon.lines)


async def test_relay_gives_away_no_password(database, broker, relay):
    url = broker.url
    scheme, rest = url.split("://")
    wrong = f"{scheme}://guest:{AMQP_PASSWORD}@{rest.rsplit('@', 1)[1]}"
    daemon = relay(
        DATABASE_URL=with_password(database.url, PASSWORD), RELAY_AMQP_URL=wrong, LOG_LEVEL="debug"
    )
    await daemon.seen("broker_unavailable")
    await asyncio.to_thread(database.terminate_sessions)
    await asyncio.sleep(0.5)
    text = exported(daemon)
    assert PASSWORD not in text
    assert AMQP_PASSWORD not in text
    assert daemon.stop() == 0


async def test_refused_settings_and_the_settings_command_mask_secrets(database, simulator, drain, processes):
    broken = drain(
        wait_for=None,
        DATABASE_URL=f"mysql://root:{PASSWORD}@localhost/x",
        DRAIN_APPS={"shop": simulator.app(proxy_url=f"http://u:{PROXY_PASSWORD}@127.0.0.1:1", port=0)},
    )
    assert await broken.ended() == 2
    assert PASSWORD not in json.dumps(broken.lines) + broken.output
    assert PROXY_PASSWORD not in json.dumps(broken.lines) + broken.output
    shown = drain(
        argv=("-m", "drain", "settings"),
        wait_for=None,
        DATABASE_URL=with_password(database.url, PASSWORD),
        DRAIN_APPS={"shop": simulator.app(proxy_url=f"http://u:{PROXY_PASSWORD}@127.0.0.1:1")},
    )
    assert await shown.ended() == 0
    assert "DRAIN_APPS" in shown.output
    assert PASSWORD not in shown.output
    assert PROXY_PASSWORD not in shown.output
