"""Relay's settings, and the combinations that would break a promise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from common.errors import ConfigurationError
from common.settings import SharedSettings, Source, load, setting

DEFAULT_PROBE_PORT = 9464
MARK_MARGIN = 2.0
"""Seconds kept, at the end of a batch's deadline, for the mark and the commit."""
CLOSE_TIMEOUT = 5.0
"""Seconds for closing the broker's connection and the pool."""


class RelaySettings(Source):
    """The variables start with ``RELAY_``."""

    model_config = SettingsConfigDict(env_prefix="RELAY_")

    amqp_url: SecretStr = setting(
        SecretStr("amqp://guest:guest@localhost/"), "RabbitMQ URL, amqp:// or amqps://"
    )
    amqp_ca_file: Path | None = setting(None, "PEM of the CAs to trust for amqps; none: the system's")
    amqp_cert_file: Path | None = setting(None, "PEM of the client certificate for amqps")
    amqp_key_file: Path | None = setting(None, "PEM of the client certificate's key")
    amqp_connect_timeout: float = setting(10.0, "for opening the broker's connection", "seconds", gt=0, le=60)
    amqp_heartbeat: int = setting(
        30, "AMQP heartbeat; a dead peer is found within three", "seconds", ge=1, le=600
    )
    exchange: str = setting("events", "exchange of rows that name none", min_length=1)
    declare_exchange: bool = setting(True, "declare it (topic, durable) after each connect")
    unroutable: Literal["retry", "accept"] = setting(
        "retry", "message that no queue takes: retry then quarantine, or accept as published"
    )
    cloud_events: bool = setting(False, "send CloudEvents attributes (binary mode of the AMQP binding)")
    app_id: str = setting("relay", "AMQP app_id of every message")
    max_body_bytes: int = setting(
        16_000_000,
        "larger bodies are quarantined unsent; at most the broker's max_message_size",
        "bytes",
        ge=1,
        le=2**29,
    )
    tick: float = setting(5.0, "between two looks at an idle outbox", "seconds", ge=0.01, le=300)
    batch_size: int = setting(
        500, "rows of one batch; a full one is followed by the next at once", "rows", ge=1, le=5000
    )
    lanes: int = setting(
        2, "batches in flight in this process: a transaction and a channel each", "lanes", ge=1, le=32
    )
    confirm_timeout: float = setting(10.0, "for all confirms of a batch", "seconds", gt=0, le=300)
    batch_deadline: float = setting(
        15.0,
        "for one batch from BEGIN to COMMIT; the server ends the transaction too",
        "seconds",
        gt=0,
        le=600,
    )
    max_attempts: int = setting(
        5, "of a row that fails by its own fault, then quarantine", "attempts", ge=1, le=1000
    )
    retry_base: float = setting(
        5.0, "delay after a row's first failure; doubles each time", "seconds", gt=0, le=3600
    )
    retry_cap: float = setting(600.0, "the longest such delay", "seconds", gt=0, le=86400)
    nack_delay: float = setting(
        5.0, "before a row is tried again that a queue refused", "seconds", gt=0, le=3600
    )
    backoff_base: float = setting(0.25, "after a failed batch; doubles each time", "seconds", gt=0, le=60)
    backoff_cap: float = setting(10.0, "the longest such wait", "seconds", gt=0, le=600)
    wakeup: bool = setting(False, "LISTEN for the trigger of `migrations wakeup enable`")
    listen_url: SecretStr | None = setting(
        None, "URL of the LISTEN connection, past a pgbouncer; none: DATABASE_URL"
    )
    retention_days: float = setting(
        7.0, "published rows are kept this long; -1 for ever", "days", ge=-1, le=36500
    )
    inbox_retention_days: float = setting(
        30.0, "inbox rows are kept this long; -1 for ever", "days", ge=-1, le=36500
    )
    prune_batch: int = setting(1000, "rows of one DELETE", "rows", ge=1, le=50_000)
    prune_interval: float = setting(10.0, "between two rounds of pruning", "seconds", ge=0.1, le=86400)
    prune_budget: float = setting(1.0, "of one round", "seconds", gt=0, le=60)
    stop_deadline: float = setting(20.0, "after a signal, for the batches in flight", "seconds", gt=0, le=600)
    grace: float = setting(
        30.0, "what the platform allows between TERM and KILL; only checked", "seconds", gt=0, le=3600
    )

    @field_validator("amqp_url")
    @classmethod
    def _amqp_url_scheme(cls, value: SecretStr) -> SecretStr:
        if not value.get_secret_value().startswith(("amqp://", "amqps://")):
            raise ValueError("must start with amqp:// or amqps://")
        return value

    @field_validator("exchange", "app_id")
    @classmethod
    def _short_string(cls, value: str) -> str:
        if len(value.encode()) > 255:
            raise ValueError(f"has {len(value.encode())} bytes, AMQP allows 255")
        return value


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything relay is told."""

    shared: SharedSettings
    relay: RelaySettings


def load_settings() -> Settings:
    """Read and check all settings.

    Raises:
        ConfigurationError: every bad value, or the first bad combination, with its numbers.
    """
    settings = Settings(load(SharedSettings, probe_port=DEFAULT_PROBE_PORT), load(RelaySettings))
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Refuse combinations that would break a promise.

    Raises:
        ConfigurationError: with both numbers and the rule.
    """
    relay, shared = settings.relay, settings.shared
    if relay.confirm_timeout + MARK_MARGIN > relay.batch_deadline:
        raise ConfigurationError(
            f"RELAY_CONFIRM_TIMEOUT ({relay.confirm_timeout:g} s) + {MARK_MARGIN:g} s for the mark must fit into "
            f"RELAY_BATCH_DEADLINE ({relay.batch_deadline:g} s): a transaction never outlives its deadline"
        )
    if relay.batch_deadline > relay.stop_deadline:
        raise ConfigurationError(
            f"RELAY_BATCH_DEADLINE ({relay.batch_deadline:g} s) must not be above RELAY_STOP_DEADLINE "
            f"({relay.stop_deadline:g} s): a batch in flight finishes before the daemon leaves"
        )
    if relay.stop_deadline + CLOSE_TIMEOUT >= relay.grace:
        raise ConfigurationError(
            f"RELAY_STOP_DEADLINE ({relay.stop_deadline:g} s) + {CLOSE_TIMEOUT:g} s for closing must be below "
            f"RELAY_GRACE ({relay.grace:g} s): else the platform kills a relay that is still finishing"
        )
    if shared.live_after < 2 * relay.batch_deadline:
        raise ConfigurationError(
            f"LIVE_AFTER ({shared.live_after:g} s) must be at least twice RELAY_BATCH_DEADLINE "
            f"({relay.batch_deadline:g} s): a slow batch is no reason for a restart"
        )
    if shared.database_pool_size < relay.lanes:
        raise ConfigurationError(
            f"DATABASE_POOL_SIZE ({shared.database_pool_size}) must not be below RELAY_LANES ({relay.lanes}): "
            "each lane holds a connection while it publishes"
        )
    if (relay.amqp_cert_file is None) != (relay.amqp_key_file is None):
        raise ConfigurationError("RELAY_AMQP_CERT_FILE and RELAY_AMQP_KEY_FILE go together")
    if relay.retry_base > relay.retry_cap:
        raise ConfigurationError(
            f"RELAY_RETRY_BASE ({relay.retry_base:g} s) is above RELAY_RETRY_CAP ({relay.retry_cap:g} s)"
        )
