"""Carrying out an action: on the request at hand, or on a connection by order of the control API."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from deploy.simulator import actions, frames
from deploy.simulator.actions import ConnectionAction, RequestAction, plausibly_delivered
from deploy.simulator.answers import debug_data

if TYPE_CHECKING:
    from deploy.simulator.connection import Connection
    from deploy.simulator.simulator import Simulator
    from deploy.simulator.stream import Stream


def perform(simulator: Simulator, connection: Connection, stream: Stream, action: RequestAction) -> None:
    """The stream has a request and an arrival. A fault that leaves the stream alone is followed by its answer."""
    match action:
        case actions.Answer():
            simulator.answer(connection, stream, action)
        case actions.Pass():
            _answer(simulator, connection, stream)
        case actions.Hold():
            assert stream.request is not None
            stream.due = simulator.natural_answer(stream.request)
            simulator.held.append((connection, stream))
        case actions.Silence():
            _give_up(simulator, stream, action, "silent")
        case actions.Reset(code=code):
            _give_up(simulator, stream, action, "reset")
            connection.reset(stream, code)
        case actions.Garbage(hex=text):
            _give_up(simulator, stream, action, "silent")
            connection.write(bytes.fromhex(text))
        case actions.Mute():
            _give_up(simulator, stream, action, "silent")
            _mute(connection)
        case actions.Drop(rst=rst):
            _give_up(simulator, stream, action, "lost")
            connection.drop(rst)
        case actions.Close():
            _give_up(simulator, stream, action, "lost")
            connection.close()
        case actions.GoAway():
            at_hand = {"this": stream.id, "before": max(0, stream.id - 2)}
            _go_away(connection, action, at_hand)
            if stream.open:
                _answer(simulator, connection, stream)
        case actions.StopReading(seconds=seconds):
            _stop_reading(simulator, connection, seconds)
            _answer(simulator, connection, stream)
        case actions.StreamLimit(streams=streams):
            connection.limit_streams(streams)
            _answer(simulator, connection, stream)
        case actions.HoldWindow():
            connection.receive_window.held = True
            _answer(simulator, connection, stream)
        case _:
            assert_never(action)


def act(simulator: Simulator, connection: Connection, action: ConnectionAction) -> None:
    """On a whole connection, now."""
    match action:
        case actions.Reset(code=code):
            for stream in list(connection.streams.values()):
                _give_up(simulator, stream, action, "reset")
                connection.reset(stream, code)
        case actions.GoAway():
            below = min(connection.streams, default=connection.receiver.highest + 2) - 2
            _go_away(connection, action, {"this": connection.receiver.highest, "before": max(0, below)})
        case actions.Drop(rst=rst):
            connection.drop(rst)
        case actions.Close():
            connection.close()
        case actions.Mute():
            _mute(connection)
        case actions.Unmute():
            connection.muted = False
        case actions.StopReading(seconds=seconds):
            _stop_reading(simulator, connection, seconds)
        case actions.ResumeReading():
            connection.resume_reading()
        case actions.StreamLimit(streams=streams):
            connection.limit_streams(streams)
        case actions.HoldWindow():
            connection.receive_window.held = True
        case actions.ReleaseWindow():
            connection.release_window()
        case actions.Garbage(hex=text):
            connection.write(bytes.fromhex(text))
        case actions.Ping():
            connection.write(frames.frame(frames.PING, 0, 0, b"simulate"))
        case _:
            assert_never(action)


def _answer(simulator: Simulator, connection: Connection, stream: Stream) -> None:
    assert stream.request is not None
    simulator.answer(connection, stream, simulator.natural_answer(stream.request))


def _give_up(simulator: Simulator, stream: Stream, action: RequestAction, outcome: str) -> None:
    """The stream will not be answered; the device may have the push all the same."""
    if stream.arrival is None:
        return
    if plausibly_delivered(action):
        simulator.ledger.deliver(stream.arrival)
    stream.due = None
    simulator.ledger.end(stream.arrival, outcome)


def _mute(connection: Connection) -> None:
    connection.flush()
    connection.muted = True


def _stop_reading(simulator: Simulator, connection: Connection, seconds: float | None) -> None:
    connection.stop_reading()
    if seconds is not None:
        simulator.timeline.after(seconds, connection.resume_reading)


def _go_away(connection: Connection, action: actions.GoAway, at_hand: dict[str, int]) -> None:
    wanted = action.last_stream_id
    last = wanted if isinstance(wanted, int) else {**at_hand, "max": frames.MAX_STREAM_ID}[wanted]
    debug = action.debug.encode() if action.debug is not None else debug_data(action.reason, action.timestamp)
    connection.go_away(last, action.code, debug, action.close)
