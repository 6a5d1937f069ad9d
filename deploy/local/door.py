"""Quick administration of a private broker: expressions evaluated in its node (door.erl.txt)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from urllib.parse import quote

USER = PASSWORD = "guest"
_ACTOR = '<<"deploy.local">>'


class DoorError(RuntimeError):
    """The expression failed in the node; the message is Erlang's reason."""


@dataclass(frozen=True, slots=True)
class BrokerAdmin:
    """The address of a private broker and of its door; may be handed to other processes.

    Methods are quick (milliseconds) and open a connection each; all raise DoorError or OSError.
    """

    amqp_port: int
    door_port: int
    token: str
    host: str = "127.0.0.1"
    tls_port: int | None = None

    def url(self, vhost: str = "/", port: int | None = None) -> str:
        """AMQP URL of a vhost; ``port`` of a proxy in between."""
        where = f"{USER}:{PASSWORD}@{self.host}:{port or self.amqp_port}"
        return f"amqp://{where}/{quote(vhost, safe='')}"

    def tls_url(self, vhost: str = "/", host: str = "localhost") -> str:
        """AMQPS URL of a vhost; ``host`` is the name that the certificate must have."""
        if self.tls_port is None:
            raise ValueError("this broker has no TLS listener")
        return f"amqps://{USER}:{PASSWORD}@{host}:{self.tls_port}/{quote(vhost, safe='')}"

    def eval(self, expressions: str, timeout: float = 60.0) -> str:
        """Evaluate Erlang expressions, each ending with a comma but the last with a full stop."""
        with socket.create_connection((self.host, self.door_port), timeout) as door:
            for text in (self.token, expressions):
                packet = text.encode()
                door.sendall(struct.pack(">I", len(packet)) + packet)
            (size,) = struct.unpack(">I", _receive(door, 4))
            verdict, _, value = _receive(door, size).decode().partition(" ")
        if verdict != "ok":
            raise DoorError(f"{value} from {expressions}")
        return value

    def add_vhost(self, vhost: str) -> str:
        """Make a vhost that the user may do everything in; return its URL."""
        name = _binary(vhost)
        everything = '<<".*">>, <<".*">>, <<".*">>'
        self.eval(
            f"ok = rabbit_vhost:add({name}, {_ACTOR}), "
            f"ok = rabbit_auth_backend_internal:set_permissions({_binary(USER)}, {name}, {everything}, {_ACTOR})."
        )
        return self.url(vhost)

    def delete_vhost(self, vhost: str) -> None:
        """Delete a vhost with all in it; its connections are closed by the broker."""
        self.eval(
            f"case rabbit_vhost:delete({_binary(vhost)}, {_ACTOR}) of ok -> ok; {{error, _}} -> ok end."
        )

    def set_memory_alarm(self) -> None:
        """Block every publisher of the node, as a broker short of memory does."""
        self.eval("vm_memory_monitor:set_vm_memory_high_watermark(0).")

    def clear_memory_alarm(self) -> None:
        """Let them go on."""
        self.eval("vm_memory_monitor:set_vm_memory_high_watermark(0.4).")

    def alarms(self) -> str:
        """The node's alarms as Erlang prints them; ``[]`` for none."""
        return self.eval("rabbit_alarm:get_alarms().")

    def connections(self, vhost: str | None = None) -> int:
        """AMQP connections that are open now, of one vhost or of all."""
        return int(self.eval(f"length({_connections(vhost)})."))

    def close_connections(self, vhost: str | None = None, reason: str = "CONNECTION_FORCED") -> int:
        """Close connections from the broker's side, as an operator does; return how many."""
        close = f'fun(Pid) -> rabbit_networking:close_connection(Pid, "{reason}") end'
        return int(self.eval(f"Found = {_connections(vhost)}, lists:foreach({close}, Found), length(Found)."))

    def close_channels(self, vhost: str) -> int:
        """Make the broker close the channels of a vhost with 404, not their connections; return how many."""
        item = _info("rabbit_channel:info")
        mine = f"[Pid || Pid <- rabbit_channel:list(), [{{vhost, {_binary(vhost)}}}] =:= ({item})]"
        # As if its client had asked for an exchange that is not there, passively.
        method = (
            "{'exchange.declare', 0, <<\"closed by a test\">>, <<>>, true, false, false, false, false, []}"
        )
        ask = f"fun(Pid) -> rabbit_channel:do(Pid, {method}) end"
        return int(self.eval(f"Found = {mine}, lists:foreach({ask}, Found), length(Found)."))

    def queue_depths(self, vhost: str) -> dict[str, int]:
        """Ready and unacknowledged messages of each queue of a vhost, read from the queues themselves."""
        rows = self.eval(
            "lists:flatten([[binary_to_list(element(4, proplists:get_value(name, I))), 9, "
            "integer_to_list(proplists:get_value(messages, I)), 10] "
            f"|| I <- rabbit_amqqueue:info_all({_binary(vhost)}, [name, messages])])."
        )
        return _table(rows)

    def stop_app(self) -> None:
        """Stop RabbitMQ inside its node: listeners and connections close; a second instead of a new node's six."""
        self.eval("rabbit:stop().")

    def start_app(self) -> None:
        """Start it again, with all that is durable; returns when the listener takes connections."""
        self.eval("rabbit:start().")


def _info(function: str) -> str:
    return f"try {function}(Pid, [vhost]) of Info -> Info catch _:_ -> [] end"


def _connections(vhost: str | None) -> str:
    if vhost is None:
        return "rabbit_networking:connections()"
    item = _info("rabbit_networking:connection_info")
    return f"[Pid || Pid <- rabbit_networking:connections(), [{{vhost, {_binary(vhost)}}}] =:= ({item})]"


def _binary(text: str) -> str:
    return "<<" + ",".join(str(byte) for byte in text.encode()) + ">>"


def _receive(door: socket.socket, size: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = door.recv(size - len(chunks))
        if not chunk:
            raise OSError("the broker closed its door: it is going down, or the token is wrong")
        chunks += chunk
    return bytes(chunks)


def _table(text: str) -> dict[str, int]:
    decoded = text.strip().removeprefix('"').removesuffix('"').replace("\\t", "\t").replace("\\n", "\n")
    if decoded in ("", "[]"):
        return {}
    return {name: int(count) for name, count in (row.split("\t") for row in decoded.splitlines() if row)}
