"""The program itself: READY line, options, signals, and what stays for the next start."""

import dataclasses
import signal
import time
import typing
from pathlib import Path

import pytest

import deploy.simulator
from deploy.simulator.__main__ import main
from deploy.simulator.actions import ConnectionAction, RequestAction
from deploy.simulator.config import Config
from deploy.simulator.process import SimulatorProcess
from tests.simulator.wire import Peer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_status_0_whatever_is_open(number: signal.Signals) -> None:
    with SimulatorProcess("--set", 'latency={"kind":"fixed","seconds":60}') as simulator:
        peer = await Peer.connect(simulator.ready)
        peer.push()
        simulator.client.wait(requests=1)
        simulator.signal(number)
        started = time.monotonic()
        assert simulator.process.wait(5) == 0
        assert time.monotonic() - started < 2
        await peer.gone()
        await peer.close()


async def test_a_restart_in_the_same_directory_is_the_same_apns(tmp_path: Path) -> None:
    arguments = (
        "--state-dir",
        str(tmp_path),
        "--topic",
        "com.example.shop",
        "--name",
        "apns.test",
        "--loop",
        "asyncio",
    )
    with SimulatorProcess(*arguments) as first:
        port, files = first.ready.port, [first.ready.ca_file, first.ready.key_file]
        before = [Path(file).read_bytes() for file in files]
        assert first.ready.topics == ["com.example.shop"]
        first.kill()
    with SimulatorProcess(*arguments, "--port", str(port)) as second:
        assert second.ready.port == port
        assert [Path(file).read_bytes() for file in files] == before
        peer = await Peer.connect(second.ready, name="apns.test")
        assert (await peer.ask()).status == 200
        await peer.close()


async def test_a_given_key_and_a_lognormal_latency(tmp_path: Path) -> None:
    with SimulatorProcess("--state-dir", str(tmp_path), "--key-id", "GIVENKEY01") as first:
        key_file = first.ready.key_file
    arguments = ("--key-file", key_file, "--key-id", "OTHERNAME1", "--latency", "0.01/0.05", "--seed", "3")
    with SimulatorProcess(*arguments, "--set", "start_with_one_stream=true") as simulator:
        assert simulator.ready.key_file == key_file
        config = simulator.client.config()
        assert config["latency"] == {"median": 0.01, "p99": 0.05, "cap": 86_400.0, "kind": "lognormal"}
        assert config["start_with_one_stream"] is True
        peer = await Peer.connect(simulator.ready)
        started = time.monotonic()
        for _ in range(20):
            assert (await peer.ask()).status == 200
        assert 0.1 < time.monotonic() - started < 2
        await peer.close()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "colour=red"], "colour"),
        (["--set", "accept"], "FIELD=JSON"),
        (["--latency", "slow"], "slow"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_taken_port_is_said(simulator_process: SimulatorProcess) -> None:
    with pytest.raises(RuntimeError, match="exit status"):
        SimulatorProcess("--port", str(simulator_process.ready.port))


def test_the_manual_names_every_field_and_action() -> None:
    manual = (Path(deploy.simulator.__file__).parent / "README.md").read_text()
    names = [field.name for field in dataclasses.fields(Config)]
    for action in typing.get_args(RequestAction | ConnectionAction):
        names += [str(field.default) for field in dataclasses.fields(action) if field.name == "do"]
        names += [field.name for field in dataclasses.fields(action) if field.name != "do"]
    assert [name for name in names if f"`{name}`" not in manual] == []
