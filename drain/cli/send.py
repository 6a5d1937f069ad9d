"""``drain send``: one test push to one device, outside of the ledger, with the whole exchange shown."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from common.cli import Command, CommandFailed, CommandRefused
from common.text import duration
from drain.settings import AppSettings, Settings

if TYPE_CHECKING:
    from drain.apns.model import Push, Reply


async def run(settings: Settings, arguments: argparse.Namespace, command: Command) -> int:
    """State, ask, push, show; 0 when APNs took it."""
    # APNs' libraries take their time to load.
    from drain.apns.flight import request_headers
    from drain.apns.model import Answered
    from drain.apns.token import ProviderTokens
    from drain.cli.apns import connected, one_push, patience, session
    from drain.daemon import target

    app = chosen_app(settings, arguments.app)
    push = build(arguments, app)
    tokens = ProviderTokens()
    try:
        where = target(app)
        authorization = None
        if where.team_id and where.key_id and where.key_file:
            authorization = tokens.of(where.team_id, where.key_id, where.key_file).header()
        command.say(f"> {where.host}:{where.port}")
        for name, value, _ in request_headers(push, where.host.encode(), authorization):
            text = value.decode() if name != b"authorization" else token_text(value)
            command.say(f"> {name.decode()}: {text}")
        command.say(">", f"> {push.body.decode()}")
        await command.confirm("push this to the device?", arguments.yes)
        async with session(settings.drain, app, tokens) as opened:
            problem = await connected(opened, patience(settings.drain))
            if problem is not None:
                raise CommandFailed(f"no connection to {where.host}:{where.port}: {problem}")
            reply = await one_push(opened, push, settings.drain.push_timeout)
    except (ValueError, OSError) as error:
        raise CommandFailed(str(error)) from None
    command.say(*(f"< {line}" for line in answer(reply)))
    return 0 if isinstance(reply, Answered) and reply.status == 200 else 1


def chosen_app(settings: Settings, name: str | None) -> AppSettings:
    """The app that was named, or the only one.

    Raises:
        CommandRefused: there is no such app, or there are several and none was named.
    """
    apps = settings.drain.apps
    if name is None and len(apps) == 1:
        return next(iter(apps.values()))
    if name not in apps:
        raise CommandRefused(f"which app? --app is one of {', '.join(apps)}")
    return apps[name]


def build(arguments: argparse.Namespace, app: AppSettings) -> Push:
    """The push, checked as the daemon checks a row.

    Raises:
        CommandRefused: it can not be sent as it is.
    """
    from drain.apns.content import EPOCH, Delivery, InvalidDelivery, make_push

    if arguments.payload is not None:
        payload = arguments.payload
        if payload.startswith("@"):
            try:
                payload = Path(payload[1:]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CommandRefused(f"--payload: {error}") from None
    elif arguments.push_type == "background":
        payload = json.dumps({"aps": {"content-available": 1}})
    else:
        payload = json.dumps({"aps": {"alert": {"title": arguments.title, "body": arguments.body}}})
    expires: timedelta | None = arguments.expires_in
    expires_at = None if expires is None else datetime.now(UTC) + expires if expires else EPOCH
    push = make_push(
        Delivery(
            notification_id=uuid4(),
            device_token=arguments.device_token,
            push_type=arguments.push_type,
            priority=arguments.priority,
            collapse_id=arguments.collapse_id,
            expires_at=expires_at,
            payload=payload,
        ),
        app.topic,
    )
    if isinstance(push, InvalidDelivery):
        raise CommandRefused(push.reason)
    return push


def token_text(header: bytes) -> str:
    """The provider token's claims without its signature: whoever has the whole can push as this app for an hour."""
    from base64 import urlsafe_b64decode

    parts = header.removeprefix(b"bearer ").split(b".")
    head, claims = (json.loads(urlsafe_b64decode(part + b"==")) for part in parts[:2])
    issued = datetime.fromtimestamp(claims["iat"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"bearer (kid {head['kid']}, iss {claims['iss']}, iat {issued}, signature not shown)"


def answer(reply: Reply) -> list[str]:
    """The reply in lines."""
    from drain.apns.answers import class_of
    from drain.apns.model import Answered, MaybeDelivered, NoAnswer, NotSent

    match reply:
        case Answered(status=200, seconds=seconds):
            return [
                f"200 after {seconds:.3f} s",
                "accepted; whether the device shows it is up to APNs and the device",
            ]
        case Answered():
            lines = [f"{reply.status} {reply.reason or '(no reason given)'} after {reply.seconds:.3f} s"]
            if reply.timestamp_ms is not None:
                since = datetime.fromtimestamp(reply.timestamp_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                lines.append(f"timestamp {since}")
            kind = class_of(reply.status, reply.reason)
            return [
                *lines,
                f"drain would: {kind.value if kind else 'try again, and fail the row after a few tries'}",
            ]
        case NotSent(why=why):
            return [f"not sent: {why}"]
        case MaybeDelivered(why=why):
            return [f"no answer, maybe delivered: {why}"]
        case NoAnswer(seconds=seconds):
            return [f"no answer within {seconds:.1f} s, maybe delivered"]


def add(commands: Any) -> None:
    """Add the command to the parser."""
    text = "one test push to a device, outside of the ledger, with the whole exchange shown"
    parser = commands.add_parser("send", help=text, description=text + "; exit code 0 when APNs took it")
    parser.add_argument("device_token", metavar="TOKEN", help="device token, hexadecimal")
    parser.add_argument("--app", metavar="NAME", help="app in DRAIN_APPS; not needed when there is one")
    parser.add_argument("--title", default="Test", help="of the alert")
    parser.add_argument("--body", default="A test push by drain send", help="of the alert")
    parser.add_argument("--payload", metavar="JSON", help="the whole payload instead, or @FILE")
    parser.add_argument("--push-type", default="alert", metavar="TYPE", help="default: alert")
    parser.add_argument("--priority", type=int, choices=(1, 5, 10))
    parser.add_argument("--collapse-id", metavar="ID")
    parser.add_argument("--expires-in", type=duration, metavar="AGE", help="APNs tries for so long; 0s: once")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(command_main=run)
