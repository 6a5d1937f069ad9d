"""One stream of a connection, from its HEADERS to its end."""

from deploy.simulator.actions import Answer
from deploy.simulator.hpack import Header
from deploy.simulator.request import Arrival, Request


class Stream:
    """`request` and `arrival` (its line in the log) come when it is complete; `due` is the answer it waits for."""

    __slots__ = (
        "arrival",
        "body",
        "body_bytes",
        "due",
        "echo_id",
        "headers",
        "id",
        "open",
        "receive_window",
        "request",
        "send_window",
    )

    def __init__(self, stream_id: int, headers: list[Header], send_window: int, receive_window: int) -> None:
        self.id = stream_id
        self.headers = headers
        self.send_window = send_window
        self.receive_window = receive_window
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.open = True
        self.request: Request | None = None
        self.arrival: Arrival | None = None
        self.due: Answer | None = None
        self.echo_id = ""
