"""The parts that have no wire: header encoding, latencies, the timeline."""

import asyncio
from random import Random

import pytest
from jh2.hpack import Decoder

from deploy.simulator.hpack import header_block
from deploy.simulator.latency import LogNormal, parse_latency, sample
from deploy.simulator.timeline import Timeline


@pytest.mark.parametrize("status", [200, 400, 403, 404, 405, 410, 413, 429, 500, 503])
def test_header_blocks_can_be_read(status: int) -> None:
    for length in (0, 1, 126, 127, 128, 254, 255, 300, 20_000):
        block = header_block(status, [("Apns-Id", "x" * length), ("retry-after", "5")])
        read = Decoder().decode(block)
        assert read == [(":status", str(status)), ("apns-id", "x" * length), ("retry-after", "5")]


def test_lognormal_latencies_have_the_median_and_the_p99_asked_for() -> None:
    chance = Random(1)
    latency = parse_latency("0.04/0.4")
    assert latency == LogNormal(median=0.04, p99=0.4)
    drawn = sorted(sample(latency, chance) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(0.04, rel=0.05)
    assert drawn[19_800] == pytest.approx(0.4, rel=0.15)


def test_a_range_of_latencies() -> None:
    latency = parse_latency("0.02-0.2")
    assert all(0.02 <= sample(latency, Random(seed)) <= 0.2 for seed in range(50))


async def test_the_timeline_keeps_the_order_and_takes_earlier_calls_in_between() -> None:
    timeline, seen = Timeline(), list[str]()
    timeline.after(0.03, lambda: seen.append("third"))
    timeline.after(0.01, lambda: timeline.after(0.005, lambda: seen.append("second")))
    timeline.after(0.01, lambda: seen.append("first"))
    async with asyncio.timeout(2):
        while len(seen) < 3:
            await asyncio.sleep(0.005)
    assert seen == ["first", "second", "third"]
