"""Settings of both daemons: where they come from, how they are shown, and what both share.

Sources, the first that has a value wins: environment variable, ``<NAME>_FILE`` (path of a file with the value),
``.env`` in the working directory, a secrets directory (``SECRETS_DIR``, by default ``/run/secrets``) with one
file for each variable in lower case. An empty variable counts as not set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from common.errors import ConfigurationError
from common.schema import check_identifier

T = TypeVar("T", bound="Source")


def setting(default: Any, description: str, unit: str = "", **bounds: Any) -> Any:
    """Declare one setting with what ``settings`` prints about it: meaning, unit, bound."""
    return Field(default=default, description=description, json_schema_extra={"unit": unit}, **bounds)


class FileVariables(PydanticBaseSettingsSource):
    """Reads ``<NAME>_FILE``: the usual way of containers to hand over a secret without showing it."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return the content of the file that the variable names, stripped of the last newline."""
        prefix = self.settings_cls.model_config.get("env_prefix", "")
        name = f"{prefix}{field_name}_FILE".upper()
        path = os.environ.get(name)
        if not path or field_name.endswith("_file"):
            return None, field_name, False
        try:
            return Path(path).read_text(encoding="utf-8").rstrip("\r\n"), field_name, False
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{name}={path!r} can not be read: {error}") from None

    def __call__(self) -> dict[str, Any]:
        """Collect all fields that have such a variable."""
        found: dict[str, Any] = {}
        for name, field in self.settings_cls.model_fields.items():
            value, key, _ = self.get_field_value(field, name)
            if value is not None:
                is_complex = self.field_is_complex(field)
                found[key] = self.decode_complex_value(name, field, value) if is_complex else value
        return found


class Source(BaseSettings):
    """Base of every settings class; remembers which source gave each value."""

    model_config = SettingsConfigDict(
        env_ignore_empty=True, env_file=".env", extra="ignore", frozen=True, validate_default=True
    )
    _sources: ClassVar[dict[str, str]]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order of the sources, first wins."""
        named = [
            ("argument", init_settings),
            ("environment", env_settings),
            ("file variable", FileVariables(settings_cls)),
            (".env", dotenv_settings),
            ("secrets directory", file_secret_settings),
        ]
        cls._sources = {}
        for name, source in named:
            for key in source():
                cls._sources.setdefault(key, name)
        return tuple(source for _, source in named)


def load(cls: type[T], **defaults: Any) -> T:
    """Build settings from the environment.

    Args:
        cls: the settings class.
        defaults: another default for some fields, below every source (a daemon's own probe port).

    Raises:
        ConfigurationError: one line for each bad value, with the variable's name, the value and the bound.
    """
    secrets = os.environ.get("SECRETS_DIR") or "/run/secrets"
    if defaults:
        fields = {
            name: (cls.model_fields[name].annotation, _with_default(cls.model_fields[name], value))
            for name, value in defaults.items()
        }
        cls = _derive(cls, fields)
    try:
        return cls(_secrets_dir=secrets if Path(secrets).is_dir() else None)
    except ValidationError as error:
        prefix = str(cls.model_config.get("env_prefix", ""))
        raise ConfigurationError("; ".join(_explain(prefix, error))) from None
    except ValueError as error:  # a JSON value that is no JSON
        raise ConfigurationError(str(error)) from None


def _with_default(field: FieldInfo, value: Any) -> FieldInfo:
    clone = FieldInfo.merge_field_infos(field)
    clone.default = value
    return clone


def _derive(cls: type[T], fields: dict[str, Any]) -> type[T]:
    namespace: dict[str, Any] = {
        "__annotations__": {k: v[0] for k, v in fields.items()},
        "__module__": cls.__module__,
    }
    namespace.update({name: field for name, (_, field) in fields.items()})
    return type(cls.__name__, (cls,), namespace)


def _explain(prefix: str, error: ValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False):
        where = (prefix + ".".join(str(part) for part in item["loc"])).upper() if item["loc"] else "settings"
        given = item.get("input")
        secret = isinstance(given, SecretStr) or any(word in where for word in ("URL", "PASSWORD", "SECRET"))
        shown = "" if secret or isinstance(given, Mapping) else f" (given: {given!r})"
        yield f"{where}: {item['msg']}{shown}"


class SharedSettings(Source):
    """What both daemons need; the variables carry no prefix."""

    database_url: SecretStr = setting(
        SecretStr("postgresql://localhost/postgres"),
        "PostgreSQL URL; libpq parameters such as sslmode=verify-full work",
    )
    database_schema: str = setting("relay_drain", "schema that holds the tables")
    database_pool_size: int = setting(4, "connections of one process at most", "connections", ge=1, le=200)
    database_connect_timeout: float = setting(5.0, "for opening a connection", "seconds", gt=0, le=60)
    database_command_timeout: float = setting(10.0, "for one statement", "seconds", gt=0, le=60)
    database_acquire_timeout: float = setting(
        5.0, "for a free connection of the pool", "seconds", gt=0, le=60
    )
    database_statement_cache: int = setting(
        100,
        "prepared statements for each connection; 0 behind pgbouncer in transaction mode",
        "statements",
        ge=0,
        le=1000,
    )
    probe_host: str = setting("127.0.0.1", "address of /metrics, /livez, /readyz; 0.0.0.0 in a container")
    probe_port: int = setting(9464, "port of the same; 0 takes a free one", ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least level that is logged")
    log_format: Literal["auto", "json", "console"] = setting("auto", "auto: console on a terminal, else JSON")
    observe_interval: float = setting(15.0, "between two looks at the queue's lag", "seconds", ge=1, le=300)
    observe_timeout: float = setting(2.0, "for one statement of such a look", "seconds", gt=0, le=30)
    live_after: float = setting(
        60.0, "/livez fails when the loop has not turned for this long", "seconds", ge=1, le=3600
    )
    stalled_exit: float = setting(
        900.0,
        "exit 1 when no step succeeded for this long although all it needs is there; 0 never",
        "seconds",
        ge=0,
        le=86400,
    )
    instance: str = setting("", "name of this process in logs and claimed_by; empty: host name and pid")

    @field_validator("database_schema")
    @classmethod
    def _schema_is_identifier(cls, value: str) -> str:
        return check_identifier(value)

    @field_validator("database_url")
    @classmethod
    def _database_url_scheme(cls, value: SecretStr) -> SecretStr:
        if not value.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise ValueError("must start with postgresql://")
        return value


@dataclass(frozen=True, slots=True)
class Shown:
    """One line of ``relay settings``: everything about one setting, secrets masked."""

    variable: str
    value: str
    source: str
    default: str
    unit: str
    bound: str
    description: str


def show(settings: Source) -> Iterator[Shown]:
    """Describe every setting of one class, in the order of the class."""
    cls = type(settings)
    prefix = str(cls.model_config.get("env_prefix", "")).upper()
    sources = getattr(cls, "_sources", {})
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        yield Shown(
            variable=prefix + name.upper(),
            value=masked(getattr(settings, name)),
            source=sources.get(name, "default"),
            default=masked(field.default),
            unit=str(extra.get("unit", "")),
            bound=_bound(field),
            description=field.description or "",
        )


def masked(value: Any) -> str:
    """Return the value as text; of a secret only that it is set."""
    if isinstance(value, SecretStr):
        return "****" if value.get_secret_value() else ""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {masked(item)}" for key, item in value.items()) + "}"
    return str(value)


def _bound(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts = [
        f"{sign} {getattr(rule, key)}"
        for rule in field.metadata
        for key, sign in signs.items()
        if hasattr(rule, key)
    ]
    literal = getattr(field.annotation, "__args__", ())
    if not parts and getattr(field.annotation, "__origin__", None) is Literal:
        return " | ".join(str(item) for item in literal)
    return ", ".join(parts)


def unknown_variables(prefix: str, *classes: type[Source]) -> list[str]:
    """Variables that start with the daemon's prefix and mean nothing: most often a misspelt setting."""
    known = {
        (str(cls.model_config.get("env_prefix", "")) + name).upper()
        for cls in classes
        for name in cls.model_fields
    }
    known |= {name + "_FILE" for name in known}
    # Kubernetes sets <SERVICE>_PORT, <SERVICE>_SERVICE_HOST, ... for a service that bears the daemon's name.
    service = ("PORT", "SERVICE_")
    return sorted(
        name
        for name in os.environ
        if name.startswith(prefix) and name not in known and not name[len(prefix) :].startswith(service)
    )
