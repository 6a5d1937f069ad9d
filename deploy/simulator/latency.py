"""How long APNs takes to answer: nothing, a fixed time, a range, or a lognormal with a long tail."""

import math
import random
from dataclasses import dataclass
from typing import Annotated, Final, Literal, assert_never

from pydantic import ConfigDict, Field, TypeAdapter

_P99_SIGMAS: Final = 2.3263478740408408  # the standard normal's 99th percentile
Seconds = Annotated[float, Field(ge=0, le=86_400)]


@dataclass(frozen=True, slots=True)
class NoLatency:
    kind: Literal["none"] = "none"
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Fixed:
    seconds: Seconds
    kind: Literal["fixed"] = "fixed"
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Uniform:
    low: Seconds
    high: Seconds
    kind: Literal["uniform"] = "uniform"
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`median` and `p99` in seconds; p99 must not be below the median. `cap` cuts the tail."""

    median: Annotated[float, Field(gt=0, le=86_400)]
    p99: Annotated[float, Field(gt=0, le=86_400)]
    cap: Seconds = 86_400.0
    kind: Literal["lognormal"] = "lognormal"
    __pydantic_config__ = ConfigDict(extra="forbid")


Latency = Annotated[NoLatency | Fixed | Uniform | LogNormal, Field(discriminator="kind")]


def sample(latency: NoLatency | Fixed | Uniform | LogNormal, chance: random.Random) -> float:
    """Seconds this answer takes."""
    match latency:
        case NoLatency():
            return 0.0
        case Fixed(seconds):
            return seconds
        case Uniform(low, high):
            return chance.uniform(low, high)
        case LogNormal(median, p99, cap):
            sigma = max(0.0, math.log(p99 / median)) / _P99_SIGMAS
            return min(cap, chance.lognormvariate(math.log(median), sigma))
        case _:
            assert_never(latency)


def parse_latency(text: str) -> NoLatency | Fixed | Uniform | LogNormal:
    """Command-line forms: "0", "0.05", "0.02-0.2" (uniform), "0.04/0.4" (lognormal median/p99). ValueError else."""
    adapter: TypeAdapter[NoLatency | Fixed | Uniform | LogNormal] = TypeAdapter(Latency)
    numbers = [float(part) for part in text.replace("/", "-").split("-")]
    match numbers:
        case [seconds]:
            return adapter.validate_python(
                {"kind": "fixed", "seconds": seconds} if seconds else {"kind": "none"}
            )
        case [low, high]:
            if "/" in text:
                return adapter.validate_python({"kind": "lognormal", "median": low, "p99": high})
            return adapter.validate_python({"kind": "uniform", "low": low, "high": high})
        case _:
            raise ValueError(f"latency {text!r}: want SECONDS, LOW-HIGH or MEDIAN/P99")
