"""Drain's settings, and the combinations that would break a promise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from common.errors import ConfigurationError
from common.settings import SharedSettings, Source, load, setting

DEFAULT_PROBE_PORT = 9465
CLOSE_TIMEOUT = 5.0
"""Seconds for closing the pool and what is left of the connections."""


class AppSettings(BaseModel):
    """One app of ``DRAIN_APPS``: where its pushes go and as whom."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: str = Field(min_length=1, max_length=200, description="bundle id, without a push type's suffix")
    environment: Literal["production", "sandbox"] = "production"
    team_id: str | None = Field(None, min_length=1, max_length=64)
    key_id: str | None = Field(None, min_length=1, max_length=64)
    key_file: Path | None = Field(None, description="the .p8 file, read again when it changes")
    certificate_file: Path | None = Field(None, description="PEM; instead of the three fields of a key")
    certificate_key_file: Path | None = None
    host: str | None = Field(None, description="instead of Apple's host of the environment")
    port: int = Field(443, ge=1, le=65535, description="443, or 2197 past a firewall")
    ca_file: Path | None = Field(None, description="PEM of the CAs to trust; none: the system's")
    proxy_url: SecretStr | None = Field(None, description="http://user:password@host:port of a CONNECT proxy")
    window: int | None = Field(None, ge=1, le=100_000, description="instead of DRAIN_APP_WINDOW")

    @model_validator(mode="after")
    def _one_way_to_authenticate(self) -> AppSettings:
        key = [self.team_id, self.key_id, self.key_file]
        if self.certificate_file is not None:
            if any(part is not None for part in key):
                raise ValueError("give either certificate_file or team_id, key_id and key_file")
        elif any(part is None for part in key):
            raise ValueError("team_id, key_id and key_file are needed together (or certificate_file alone)")
        return self


class DrainSettings(Source):
    """The variables start with ``DRAIN_``."""

    model_config = SettingsConfigDict(env_prefix="DRAIN_")

    apps: dict[str, AppSettings] = setting(
        {}, "JSON object: name in notification_deliveries.app -> app", "apps"
    )
    claim_size: int = setting(100, "rows of one claim for each app at most", "rows", ge=1, le=5000)
    window: int = setting(
        2000, "rows claimed and not settled in this process at most", "rows", ge=1, le=100_000
    )
    app_window: int = setting(1000, "the same for each app", "rows", ge=1, le=100_000)
    poll_interval: float = setting(1.0, "between two claims of an idle app", "seconds", ge=0.01, le=300)
    lease: float = setting(
        120.0, "a claimed row belongs to its claimer for this long", "seconds", ge=2, le=3600
    )
    push_timeout: float = setting(20.0, "from the write of a push to APNs' answer", "seconds", gt=0, le=300)
    settle_margin: float = setting(
        15.0,
        "of the lease, kept for writing the outcome: a push starts only before it",
        "seconds",
        gt=0,
        le=600,
    )
    settle_size: int = setting(200, "outcomes written by one statement at most", "rows", ge=1, le=5000)
    settle_age: float = setting(0.1, "an outcome waits for company at most this long", "seconds", ge=0, le=10)
    max_attempts: int = setting(
        8, "claims of a row that are not given back, then failed", "attempts", ge=1, le=1000
    )
    retry_base: float = setting(
        5.0, "a row's first transient failure is tried again within this; doubles", "seconds", gt=0, le=3600
    )
    retry_cap: float = setting(900.0, "the longest such delay", "seconds", gt=0, le=86400)
    pause_base: float = setting(
        5.0, "an app with a configuration error rests this long; doubles", "seconds", gt=0, le=3600
    )
    pause_cap: float = setting(300.0, "the longest such rest", "seconds", gt=0, le=86400)
    mass_failure: int = setting(
        10,
        "different tokens of one app in a row that APNs calls bad: the app pauses",
        "tokens",
        ge=2,
        le=100_000,
    )
    connections: int = setting(4, "to APNs for each app at most", "connections", ge=1, le=100)
    streams: int = setting(
        500, "on one connection at most; APNs' own limit applies too", "streams", ge=1, le=2000
    )
    connect_timeout: float = setting(5.0, "for TCP, and again for TLS", "seconds", gt=0, le=60)
    retention_days: float = setting(
        30.0, "terminal rows are kept this long; -1 for ever", "days", ge=-1, le=36500
    )
    prune_batch: int = setting(1000, "rows of one DELETE", "rows", ge=1, le=50_000)
    prune_interval: float = setting(10.0, "between two rounds of pruning", "seconds", ge=0.1, le=86400)
    prune_budget: float = setting(1.0, "of one round", "seconds", gt=0, le=60)
    backoff_base: float = setting(0.25, "after a failed claim; doubles each time", "seconds", gt=0, le=60)
    backoff_cap: float = setting(10.0, "the longest such wait", "seconds", gt=0, le=600)
    drain_deadline: float = setting(25.0, "after a signal, for the pushes in flight", "seconds", gt=0, le=600)
    flush_deadline: float = setting(15.0, "then, for writing the outcomes", "seconds", gt=0, le=600)
    grace: float = setting(
        60.0, "what the platform allows between TERM and KILL; only checked", "seconds", gt=0, le=3600
    )

    @field_validator("apps")
    @classmethod
    def _names(cls, value: dict[str, AppSettings]) -> dict[str, AppSettings]:
        for name in value:
            if not name or len(name) > 100:
                raise ValueError(f"app name {name!r} must have 1 to 100 characters")
        return value


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything drain is told."""

    shared: SharedSettings
    drain: DrainSettings

    def app_window(self, name: str) -> int:
        """Rows of one app in this process: never more than its share of the whole window, so that no app can
        take the room of another."""
        own = self.drain.apps[name].window or self.drain.app_window
        return max(1, min(own, self.drain.window // len(self.drain.apps)))


def load_settings() -> Settings:
    """Read and check all settings.

    Raises:
        ConfigurationError: every bad value, or the first bad combination, with its numbers.
    """
    settings = read_settings()
    check(settings)
    return settings


def read_settings() -> Settings:
    """Read all settings without a look at their combinations, which only the daemon depends on.

    Raises:
        ConfigurationError: every bad value.
    """
    return Settings(load(SharedSettings, probe_port=DEFAULT_PROBE_PORT), load(DrainSettings))


def check(settings: Settings) -> None:
    """Refuse combinations that would break a promise.

    Raises:
        ConfigurationError: with the numbers and the rule.
    """
    drain, shared = settings.drain, settings.shared
    if not drain.apps:
        raise ConfigurationError("DRAIN_APPS names no app; see docs/drain.md for its form")
    if drain.push_timeout + drain.settle_margin >= drain.lease:
        raise ConfigurationError(
            f"DRAIN_PUSH_TIMEOUT ({drain.push_timeout:g} s) + DRAIN_SETTLE_MARGIN ({drain.settle_margin:g} s) must be "
            f"below DRAIN_LEASE ({drain.lease:g} s): else no push could ever start"
        )
    if shared.database_command_timeout > drain.settle_margin:
        raise ConfigurationError(
            f"DATABASE_COMMAND_TIMEOUT ({shared.database_command_timeout:g} s) must not be above DRAIN_SETTLE_MARGIN "
            f"({drain.settle_margin:g} s): one slow write would outlive the lease"
        )
    if drain.drain_deadline + drain.flush_deadline + CLOSE_TIMEOUT >= drain.grace:
        raise ConfigurationError(
            f"DRAIN_DRAIN_DEADLINE ({drain.drain_deadline:g} s) + DRAIN_FLUSH_DEADLINE ({drain.flush_deadline:g} s) + "
            f"{CLOSE_TIMEOUT:g} s for closing must be below DRAIN_GRACE ({drain.grace:g} s): else the platform kills a "
            "drain that is still writing outcomes"
        )
    if drain.grace >= drain.lease:
        raise ConfigurationError(
            f"DRAIN_GRACE ({drain.grace:g} s) must be below DRAIN_LEASE ({drain.lease:g} s): else rows of a drain that "
            "is stopping are claimed by another"
        )
    if shared.live_after < 2 * shared.database_command_timeout:
        raise ConfigurationError(
            f"LIVE_AFTER ({shared.live_after:g} s) must be at least twice DATABASE_COMMAND_TIMEOUT "
            f"({shared.database_command_timeout:g} s): one slow claim is no reason for a restart"
        )
    if drain.retry_base > drain.retry_cap:
        raise ConfigurationError(
            f"DRAIN_RETRY_BASE ({drain.retry_base:g} s) is above DRAIN_RETRY_CAP ({drain.retry_cap:g} s)"
        )
    if drain.window < len(drain.apps):
        raise ConfigurationError(
            f"DRAIN_WINDOW ({drain.window}) is below the number of apps ({len(drain.apps)})"
        )
