"""What ``drain check`` looks at: everything that the daemon needs. Changes nothing, notifies nobody."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import assert_never
from uuid import uuid4

import asyncpg
from cryptography import x509

from common import sql as common_sql
from common.checks import Check, Privilege, database_checks, settings_check
from common.database import connect_arguments
from common.errors import DATABASE_ERRORS
from common.explain import describe_error
from common.schema import qualify
from common.settings import unknown_variables
from drain.apns.answers import Class, class_of
from drain.apns.connect import ConnectError, ssl_context
from drain.apns.model import Answered, MaybeDelivered, NoAnswer, NotSent, Push, Reply
from drain.apns.token import ProviderTokens, load_key, sign
from drain.cli.apns import connected, one_push, patience, session
from drain.daemon import target
from drain.settings import AppSettings, DrainSettings, Settings

NAME = "drain-check"
NOBODY = "00" * 32
"""A device token that no device has."""
CERTIFICATE_WARNING = timedelta(days=30)
_HINTS = {
    "InvalidProviderToken": "check team_id and key_id against the key file; a revoked key gives this too",
    "ExpiredProviderToken": "this host's clock is wrong",
    "MissingProviderToken": "APNs saw neither token nor certificate",
    "BadEnvironmentKeyInToken": "the key is not valid for this environment: production or sandbox?",
    "BadEnvironmentKeyIdInToken": "the key is not valid for this environment: production or sandbox?",
    "BadCertificate": "the certificate is not valid for this topic, or has expired",
    "BadCertificateEnvironment": "the certificate is of the other environment: production or sandbox?",
    "BadTopic": "check topic: the bundle id, without a push type's suffix",
    "TopicDisallowed": "this team, key or certificate may not push to this topic",
    "TooManyProviderTokenUpdates": "another program signs tokens with this key; wait 20 minutes",
}


async def checks(settings: Settings, only: Sequence[str] | None) -> AsyncIterator[Check]:
    """Every check, in the order in which the daemon needs things."""
    yield settings_check(unknown_variables("DRAIN_", DrainSettings))
    reached = False
    async for check in database_checks(settings.shared, NAME, privileges(settings.drain)):
        reached = reached or (check.name == "database" and check.state == "ok")
        yield check
    if reached:
        yield await ledger_check(settings)
    for name in only or settings.drain.apps:
        if name not in settings.drain.apps:
            yield Check(name, "FAIL", "not in DRAIN_APPS")
            continue
        async for check in app_checks(settings.drain, name, settings.drain.apps[name]):
            yield check


def privileges(drain: DrainSettings) -> list[Privilege]:
    """What drain does to the tables: claim and settle, and report dead device tokens through the outbox."""
    claim = ("status", "attempts", "next_attempt_at", "claim_version", "claimed_by")
    settle = ("last_status", "last_reason", "finished_at")
    event = ("aggregate_type", "aggregate_id", "event_type", "payload", "headers")
    token = ("app", "device_token", "dead_since", "dead_reason", "notification_id")
    needed = [
        Privilege("notification_deliveries", "SELECT"),
        Privilege("notification_deliveries", "UPDATE", claim + settle),
        Privilege("device_tokens", "SELECT"),
        Privilege("device_tokens", "INSERT", token),
        Privilege("device_tokens", "UPDATE", token[2:]),
        Privilege("outbox", "INSERT", event),
    ]
    if drain.retention_days >= 0:
        needed.append(Privilege("notification_deliveries", "DELETE"))
    return needed


async def ledger_check(settings: Settings) -> Check:
    """Open rows of an app that is configured nowhere wait for ever."""
    try:
        connection = await asyncpg.connect(**connect_arguments(settings.shared, NAME))
        try:
            found = await connection.fetch(
                qualify(common_sql.DELIVERIES_APPS, settings.shared.database_schema)
            )
        finally:
            connection.terminate()
    except DATABASE_ERRORS as error:
        return Check("ledger", "FAIL", describe_error(error))
    strangers = [row["app"] for row in found if row["app"] not in settings.drain.apps]
    if strangers:
        return Check(
            "ledger",
            "warn",
            f"open rows of apps that are not in DRAIN_APPS here: {', '.join(strangers[:5])}",
            "another drain's, or misspelt? nobody else pushes them",
        )
    return Check("ledger", "ok", "every app with open rows is configured")


async def app_checks(drain: DrainSettings, name: str, app: AppSettings) -> AsyncIterator[Check]:
    """Credentials on disk, the way to APNs, and what APNs says to both."""
    try:
        yield credentials_check(name, app)
    except (ValueError, OSError, ConnectError) as error:
        yield Check(name, "FAIL", str(error), "check key_file or certificate_file of this app in DRAIN_APPS")
        return
    tokens = ProviderTokens()
    async with session(drain, app, tokens) as opened:
        where = f"{opened.target.host}:{opened.target.port}"
        began = time.monotonic()
        problem = await connected(opened, patience(drain))
        if problem is not None:
            hint = "port 2197 or a proxy_url may pass a firewall" if opened.target.port == 443 else ""
            yield Check(name, "FAIL", f"{where}: {problem}", hint)
            return
        yield Check(name, "ok", f"{where}: TLS and HTTP/2 stand after {time.monotonic() - began:.2f} s")
        yield answer_check(name, await one_push(opened, probe(app.topic), drain.push_timeout))


def credentials_check(name: str, app: AppSettings) -> Check:
    """Read what authenticates the app, as the daemon does.

    Raises:
        ValueError, OSError, ConnectError: the file can not be used; the text names it.
    """
    ssl_context(target(app))
    if app.key_file is not None and app.team_id is not None and app.key_id is not None:
        sign(load_key(app.key_file), app.team_id, app.key_id, int(time.time()))
        if _readable_by_all(app.key_file):
            return Check(name, "warn", f"key file {app.key_file} can be read by every user", "chmod o-r")
        return Check(name, "ok", f"key file {app.key_file}: a P-256 key; a token can be signed")
    assert app.certificate_file is not None
    certificate = x509.load_pem_x509_certificate(app.certificate_file.read_bytes())
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    text = f"certificate {app.certificate_file} is valid for {left.days} days"
    if left < timedelta():
        return Check(name, "FAIL", f"certificate {app.certificate_file} has expired", "renew it at Apple")
    if left < CERTIFICATE_WARNING:
        return Check(name, "warn", text, "renew it at Apple")
    return Check(name, "ok", text)


def _readable_by_all(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o004)


def probe(topic: str) -> Push:
    """A push that reaches nobody: not stored, and to a device that can not exist."""
    return Push(
        notification_id=str(uuid4()),
        device_token=NOBODY,
        topic=topic,
        push_type="alert",
        priority=5,
        expiration=0,
        collapse_id=None,
        body=b'{"aps":{}}',
    )


def answer_check(name: str, reply: Reply) -> Check:
    """What the answer to the probe says of our credentials."""
    match reply:
        case Answered(status=200):
            return Check(
                name, "ok", "a probe to a device that can not exist was accepted: no APNs of Apple's"
            )
        case Answered(status=status, reason=reason, seconds=seconds):
            kind = class_of(status, reason)
            text = f"a probe was answered {status} {reason or 'without a reason'} after {seconds:.2f} s"
            if kind in (Class.DEAD, Class.DEAD_SINCE, Class.ROW):
                return Check(name, "ok", f"credentials and topic are accepted ({text})")
            return Check(name, "FAIL", text, _HINTS.get(reason or "", ""))
        case NotSent(why=why) | MaybeDelivered(why=why):
            return Check(name, "FAIL", f"a probe got no answer: {why}")
        case NoAnswer(seconds=seconds):
            return Check(name, "FAIL", f"a probe got no answer within {seconds:.0f} s")
        case _:
            assert_never(reply)
