"""Command line: `python -m deploy.simulator`. Prints one JSON READY line on stdout and runs until SIGTERM or SIGINT."""

import argparse
import asyncio
import gc
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from deploy.simulator.certificates import Authority, public_key_of
from deploy.simulator.config import Config
from deploy.simulator.control import Control
from deploy.simulator.latency import parse_latency
from deploy.simulator.listener import Listener
from deploy.simulator.simulator import Simulator
from deploy.simulator.tokens import SigningKey


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.simulator", description="An APNs simulator.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port (default)")
    parser.add_argument("--control-host", default="127.0.0.1")
    parser.add_argument("--control-port", type=int, default=0, help="0: any free port (default)")
    parser.add_argument(
        "--state-dir", type=Path, help="keys and certificates, used again when there; default: temporary"
    )
    parser.add_argument(
        "--name", action="append", default=[], help="a further name of the server certificate"
    )
    parser.add_argument("--team-id", default="SIMTEAM001")
    parser.add_argument("--key-id", default="SIMKEY0001")
    parser.add_argument(
        "--key-file", type=Path, help="AuthKey .p8 (or its public key as PEM); default: generated"
    )
    parser.add_argument(
        "--cert-file", type=Path, help="server certificate chain; default: issued by the own CA"
    )
    parser.add_argument("--cert-key-file", type=Path, help="key of --cert-file; default: in the same file")
    parser.add_argument(
        "--topic", action="append", default=[], help="a bundle id that is served; may be repeated"
    )
    parser.add_argument("--latency", help="seconds: FIXED, LOW-HIGH (uniform) or MEDIAN/P99 (lognormal)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=JSON",
        help="any field of the configuration (README.md)",
    )
    parser.add_argument("--seed", type=int, help="of latencies and chances")
    parser.add_argument("--log-cap", type=int, default=100_000, help="arrivals kept in the log")
    parser.add_argument(
        "--id-cap", type=int, default=1_000_000, help="apns-ids whose repetitions are counted"
    )
    parser.add_argument("--screen-cap", type=int, default=100_000, help="devices whose screen is kept")
    parser.add_argument(
        "--receive-buffer", type=int, help="SO_RCVBUF in bytes, to make stop_reading bite sooner"
    )
    parser.add_argument("--loop", choices=("auto", "uvloop", "asyncio"), default="auto")
    return parser


def _config(arguments: argparse.Namespace) -> Config:
    """Raises ValueError (pydantic's included)."""
    changes: dict[str, object] = {}
    for setting in arguments.set:
        field, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: want FIELD=JSON")
        try:
            changes[field] = json.loads(text)
        except ValueError:
            changes[field] = text  # FIELD=word is nicer to type than FIELD='"word"'
    if arguments.topic:
        changes["topics"] = arguments.topic
    config = Config().changed(changes)
    if arguments.latency is not None:
        latency = parse_latency(arguments.latency)
        config = config.changed({"latency": latency})
    return config


async def _run(arguments: argparse.Namespace, config: Config, directory: Path) -> None:
    authority = Authority(directory, ["localhost", "127.0.0.1", "::1", *arguments.name])
    key_file = arguments.key_file or authority.auth_key(arguments.key_id)
    key = SigningKey(arguments.key_id, arguments.team_id, public_key_of(key_file))
    simulator = Simulator(
        config,
        [key],
        seed=arguments.seed,
        log_cap=arguments.log_cap,
        id_cap=arguments.id_cap,
        screens=arguments.screen_cap,
    )
    given = (
        None
        if arguments.cert_file is None
        else (arguments.cert_file, arguments.cert_key_file or arguments.cert_file)
    )
    listener = Listener(
        simulator,
        lambda kind: authority.server_context(kind, given),
        (arguments.host, arguments.port),
        arguments.receive_buffer,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.set_exception_handler(_report)
    await listener.start()
    control = Control(simulator, listener, authority)
    server = await asyncio.start_server(
        control.router().serve, arguments.control_host, arguments.control_port
    )
    control_port = server.sockets[0].getsockname()[1]
    ready = {
        "event": "ready",
        "host": arguments.host,
        "port": listener.address[1],
        "control_port": control_port,
        "control_url": f"http://{arguments.control_host}:{control_port}",
        "ca_file": str(authority.ca_file),
        "key_file": str(key_file),
        "key_id": arguments.key_id,
        "team_id": arguments.team_id,
        "topics": list(config.topics),
        "client_cert_file": str(authority.client_cert_file),
        "unknown_client_cert_file": str(authority.unknown_client_cert_file),
    }
    print(json.dumps(ready), flush=True)
    # The arrival log is millions of long-lived objects without cycles: frequent full collections only cost.
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    await stop.wait()
    server.close()
    await listener.close()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Broken handshakes and lost sockets are the daily bread of a simulator; anything else is its own fault."""
    error = context.get("exception")
    if not isinstance(error, OSError):
        loop.default_exception_handler(context)


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name != "asyncio":
        try:
            import uvloop
        except ImportError:
            if name == "uvloop":
                raise
        else:
            return uvloop.new_event_loop
    return asyncio.new_event_loop


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        config = _config(options)
    except (ValidationError, ValueError) as error:
        parser.error(str(error))
    with (
        tempfile.TemporaryDirectory(prefix="apns-simulator-") as temporary,
        asyncio.Runner(loop_factory=_loop_factory(options.loop)) as runner,
    ):
        try:
            runner.run(_run(options, config, options.state_dir or Path(temporary)))
        except OSError as error:
            print(f"apns-simulator: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
