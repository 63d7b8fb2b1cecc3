"""Settings of the daemon: explicit arguments over `DTE_*` variables over one TOML file over defaults.

Invariant: a `Settings` object that exists is safe to serve with. An unknown key, a wrong value, or an address other
machines can reach without a token is refused here, with the name of the key and where it came from.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from clients.protocol import ReceiverRegistration
from engine.errors import InvalidInput
from engine.records.models import RunId

RoleName = Literal["store", "coordinator", "publisher", "subscriber"]

ROLES: tuple[RoleName, ...] = ("store", "coordinator", "publisher", "subscriber")
"""All roles in the order in which a daemon starts them; it stops them in reverse."""

ENV_PREFIX = "DTE_"
CLIENT_VARIABLES = frozenset({"DTE_CONFIG", "DTE_URL"})
PLUGIN_PREFIX = "DTE_SGLANG_"
"""`DTE_*` variables that are not settings: the path of the TOML file, the address clients talk to, and what belongs to
an engine's plugin and environment."""


class SettingsError(InvalidInput):
    """A setting is unknown, wrong, or unsafe together with another."""

    code = "settings"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _default_data_dir() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "dte"


class Settings(BaseSettings):
    """One daemon's settings. Build it with `load` to get the TOML file and readable errors."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(7411, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    token: SecretStr | None = Field(None, description="Bearer token; required unless host is loopback.")
    roles: Annotated[frozenset[RoleName], NoDecode] = Field(
        frozenset(ROLES), min_length=1, description="Comma-separated roles of this daemon."
    )
    store: str | None = Field(None, description="Store of the versions: a directory, file:// or http(s)://…/store.")
    store_token: SecretStr | None = Field(None, description="Bearer token of a remote store; default: `token`.")
    data_dir: Path = Field(default_factory=_default_data_dir, description="Spool, cache and the embedded store.")
    run: RunId | None = Field(None, description="The run meant when a request names none.")
    signing_key: SecretStr | None = Field(None, description="HMAC key that signs decisions.")
    receivers: tuple[ReceiverRegistration, ...] = Field(
        (), max_length=256, description="Receivers this daemon drives from its start, each as for POST /receivers."
    )

    p2p: bool = Field(False, description="Exchange versions rank to rank with receivers that ask for it.")
    p2p_coordinator: str | None = Field(
        None, description="Daemon with the coordinator role where ranks meet: http(s)://HOST:PORT; default: this one."
    )
    p2p_host: str | None = Field(None, description="Address at which the ranks of this node are reached by others.")
    p2p_carrier: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="What carries the bytes; auto: NCCL if every rank has a GPU of its own."
    )
    p2p_timeout_s: float = Field(30.0, gt=0, le=3600, description="Deadline of connecting, and of one exchange.")
    p2p_lease_s: float = Field(20.0, gt=0, le=3600, description="A daemon that is silent for so long is gone.")
    p2p_bucket_bytes: int = Field(4 << 20, ge=1 << 10, le=1 << 30, description="Largest message of an exchange.")
    p2p_max_bytes: int = Field(4 << 30, ge=1 << 20, description="What a receiver rank buffers of one version.")

    poll_interval_s: float = Field(0.2, gt=0, le=60)
    chunk_bytes: int = Field(8 << 20, ge=64 << 10, le=1 << 30)
    max_body_bytes: int = Field(64 << 20, ge=1 << 10, description="Largest body of any call except /store.")
    max_object_bytes: int = Field(4 << 30, ge=1 << 10, description="Largest object the embedded store takes.")
    detect_backend: Literal["cpu", "reference"] = "cpu"
    detect_threads: int = Field(default_factory=lambda: max(1, os.cpu_count() or 1), ge=1, le=1024)
    dense_fraction: float = Field(0.25, gt=0, le=1, description="Above this share of changes a tile goes dense.")
    anchor_every: int = Field(32, ge=1)
    keep_anchors: int = Field(2, ge=2)
    retention_h: float = Field(
        0.0, ge=0, description="Chunks behind `keep_anchors` anchors are deleted after so many hours; 0: never."
    )
    cache_bytes: int = Field(64 << 30, ge=1 << 20, description="Chunks a subscriber keeps on disk.")
    download_parallel: int = Field(4, ge=1, le=64, description="Chunks downloaded at the same time.")
    hold_timeout_s: float = Field(60.0, gt=0, description="A read that holds the trainer longer is revoked.")
    job_retention: int = Field(1024, ge=16)
    event_history: int = Field(4096, ge=16, description="Events kept for clients that reconnect.")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    shutdown_timeout_s: float = Field(10.0, gt=0, description="How long open requests may take to end at shutdown.")

    @field_validator("roles", mode="before")
    @classmethod
    def _split_roles(cls, value: Any) -> Any:
        return frozenset(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("receivers", mode="before")
    @classmethod
    def _of_this_run(cls, value: Any, info: ValidationInfo) -> Any:
        """A receiver that names no run follows the daemon's."""
        run = info.data.get("run")
        if run is None or not isinstance(value, list | tuple):
            return value
        return [{"run": run, **item} if isinstance(item, dict) else item for item in value]

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("token", "store_token", "signing_key")
    @classmethod
    def _usable_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            text = value.get_secret_value()
            if len(text) < 8 or not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError("must be at least 8 printable ASCII characters without spaces")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} can be reached from other machines, so `token` must be set (or bind to 127.0.0.1)"
            )
        names = [r.name for r in self.receivers]
        if len(set(names)) < len(names):
            raise ValueError("`receivers` names one receiver twice")
        if names and "subscriber" not in self.roles:
            raise ValueError("`receivers` are given, but this daemon has no subscriber role")
        meets = self.p2p and not self.roles.isdisjoint({"publisher", "subscriber"})
        if meets and self.p2p_coordinator is None and "coordinator" not in self.roles:
            raise ValueError("`p2p_coordinator` must be set, because this daemon has no coordinator role of its own")
        if self.p2p_coordinator is not None and not self.p2p_coordinator.startswith(("http://", "https://")):
            raise ValueError("`p2p_coordinator` must be the address of a daemon: http://HOST:PORT")
        if self.store is None and "store" not in self.roles:
            raise ValueError("`store` must be set, because this daemon has no store role of its own")
        return self

    @property
    def store_dir(self) -> Path:
        """Where the embedded store keeps its objects."""
        return self.data_dir / "store"

    @property
    def spool_dir(self) -> Path:
        return self.data_dir / "spool"

    @property
    def cache_dir(self) -> Path:
        return self.data_dir / "cache"

    @property
    def p2p_address(self) -> str:
        """Where the ranks of this node are reached: `p2p_host`, else `host`, else this machine's name."""
        if self.p2p_host is not None:
            return self.p2p_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host

    @property
    def ordered_roles(self) -> tuple[RoleName, ...]:
        """This daemon's roles in start order."""
        return tuple(r for r in ROLES if r in self.roles)

    @classmethod
    def load(cls, config: Path | None = None, **overrides: Any) -> Settings:
        """Settings from `overrides`, `DTE_*`, the TOML file (`config`, else the path in `DTE_CONFIG`) and defaults.

        Overrides that are None count as not given. Raises SettingsError.
        """
        env = {k.upper(): k for k in os.environ if k.upper().startswith(ENV_PREFIX)}
        known = {ENV_PREFIX + f.upper() for f in cls.model_fields}
        if unknown := sorted(env[k] for k in env.keys() - known - CLIENT_VARIABLES if not k.startswith(PLUGIN_PREFIX)):
            raise SettingsError(
                f"unknown environment variable: {', '.join(unknown)}.", remedy=f"Known are {', '.join(sorted(known))}."
            )
        path = config or (Path(os.environ["DTE_CONFIG"]) if os.environ.get("DTE_CONFIG") else None)
        from_file = _read_toml(path, frozenset(cls.model_fields)) if path else {}
        values: dict[str, Any] = {k: v for k, v in from_file.items() if ENV_PREFIX + k.upper() not in env}
        values.update({k: v for k, v in overrides.items() if v is not None})
        try:
            return cls(**values)
        except ValidationError as e:
            raise SettingsError(_explain(e, set(overrides), set(values), path)) from None


def _read_toml(path: Path, known: frozenset[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise SettingsError(f"cannot read the settings file {path}: {e.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise SettingsError(f"the settings file {path} is not valid TOML: {e}.") from None
    if unknown := sorted(values.keys() - known):
        raise SettingsError(
            f"unknown key in {path}: {', '.join(unknown)}.", remedy=f"Known are {', '.join(sorted(known))}."
        )
    return values


def _explain(error: ValidationError, overrides: set[str], given: set[str], path: Path | None) -> str:
    """All wrong keys with their source, without repeating values (they may be secrets)."""
    lines = []
    for item in error.errors(include_input=False, include_url=False):
        key = str(item["loc"][0]) if item["loc"] else ""
        message = item["msg"].removeprefix("Value error, ")
        if not key:
            lines.append(message)
            continue
        if key in overrides:
            source = "given explicitly"
        elif key in given:
            source = f"in {path}"
        else:
            source = f"in {ENV_PREFIX}{key.upper()}"
        lines.append(f"`{key}` ({source}): {message}")
    return "wrong settings: " + "; ".join(lines) + "."
