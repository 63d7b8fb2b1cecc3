"""What the daemon says to an SGLang server over HTTP: who are you, pause, update, continue.

One invariant: an answer is either understood or an error; a connection that ends is a receiver that is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from clients.http import client_settings
from clients.rollout.protocol import ReceiverError, ReceiverGone
from clients.rollout.sglang.call import (
    KEY,
    PLUGIN_PROTOCOL,
    Announcement,
    EngineAnswer,
    EngineCall,
    parse_answer,
)
from engine.errors import CodecError, InvalidInput

PauseMode = Literal["retract", "in_place", "abort"]


class SglangOptions(BaseModel):
    """`options` of a registration. `pause`: what becomes of running requests. The files have the keys with which the
    server was started; without a second one the first serves for everything."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pause: PauseMode = "retract"
    api_key_file: Path | None = None
    admin_api_key_file: Path | None = None
    timeout_s: float = 600.0


class SglangServer:
    """One server. ReceiverGone if it does not answer, InvalidInput if it cannot be driven."""

    def __init__(self, url: str, options: SglangOptions) -> None:
        self._url = url.rstrip("/")
        key = _key_in(options.api_key_file)
        # Asking takes the first key only, whatever changes something the second one only, if the server has both.
        self._keys = {"GET": key, "POST": _key_in(options.admin_api_key_file) or key}
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(60.0, connect=5.0), **client_settings(self._url, None))
        self._timeout_s = options.timeout_s
        self._model_path = ""

    async def aclose(self) -> None:
        await self._http.aclose()

    async def discover(self) -> Announcement:
        """Where the server's ranks listen."""
        try:
            info = await self._json("GET", "/server_info")
        except ReceiverGone:
            raise
        except ReceiverError as error:
            raise self._stranger(error.message) from None
        for count in ("dp_size", "pp_size", "nnodes"):
            if not isinstance(info.get(count, 1), int):
                raise self._stranger(f"`{count}` is {info[count]!r:.50}")
        refused = _unsupported(info)
        if refused is not None:
            raise InvalidInput(
                f"the server at {self._url} {refused}", remedy="See docs/sglang.md for what is supported."
            )
        states = info.get("internal_states") or [{}]
        if not isinstance(states, list) or not isinstance(states[0], dict):
            raise self._stranger("`internal_states` is no list of objects")
        found = states[0].get(KEY)
        if found is None:
            raise InvalidInput(
                f"the server at {self._url} runs without the dte plugin.",
                remedy="Install delta-transfer-engine in the server's environment, and restart it.",
            )
        try:
            announced = Announcement.model_validate(found)
        except ValidationError as error:
            raise InvalidInput(
                f"the plugin of {self._url} is of another version: {error.errors()[0]['msg']}."
            ) from None
        if announced.error is not None or announced.protocol != PLUGIN_PROTOCOL:
            raise InvalidInput(f"the plugin of {self._url} does not serve it: {announced.error or announced.protocol}")
        model = await self._json("GET", "/model_info")
        self._model_path = str(model.get("model_path", ""))
        return announced

    async def weight_version(self) -> str:
        return str((await self._json("GET", "/model_info")).get("weight_version"))

    async def name_version(self, label: str) -> None:
        """Make answers carry `label` without touching the weights."""
        await self._json("POST", "/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def pause(self, mode: PauseMode) -> None:
        await self._json("POST", "/pause_generation", {"mode": mode})

    async def go_on(self) -> None:
        await self._json("POST", "/continue_generation", {"torch_empty_cache": False})

    async def update(self, call: EngineCall, label: str | None) -> EngineAnswer:
        """The engine's update call. The answer says what came of it, also where that is a refusal."""
        body: dict[str, Any] = {
            "model_path": self._model_path,
            "manifest": {KEY: call.model_dump(mode="json")},
            "flush_cache": True,
        }
        if label is not None:
            body["weight_version"] = label
        response = await self._send("POST", "/update_weights_from_disk", body, self._timeout_s)
        try:
            return parse_answer(str(response.json()["message"]))
        except (ValueError, KeyError, TypeError, CodecError) as error:
            raise ReceiverError(
                f"the server answered the update with {response.status_code}: {response.text[:300]} ({error})"
            ) from None

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = await self._send(method, path, body, 60.0)
        if response.status_code != 200:
            text = f"{method} {path} of {self._url} answered {response.status_code}: {response.text[:300]}"
            if response.status_code in (401, 403):
                option = "api_key_file" if method == "GET" else "admin_api_key_file"
                raise InvalidInput(text, remedy=f"Give the server's key with the option `{option}`.")
            if response.status_code >= 500:
                raise ReceiverGone(text)
            raise ReceiverError(text)
        try:
            found = response.json()
        except ValueError:
            raise self._stranger(f"{path} is not JSON") from None
        if not isinstance(found, dict):
            raise self._stranger(f"{path} is no JSON object")
        return found

    def _stranger(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"{self._url} does not answer as an SGLang server: {why}.",
            remedy="Give the address of an SGLang server, of a release that docs/sglang.md names.",
        )

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> httpx.Response:
        key = self._keys[method]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(timeout_s, connect=5.0)
        try:
            return await self._http.request(method, path, json=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise ReceiverGone(f"{self._url}{path} does not answer: {type(error).__name__}: {error}") from None


def _key_in(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"the server's API key cannot be read: {error}.", remedy="Name a file that holds the key and nothing else."
        ) from None


def _unsupported(info: dict[str, Any]) -> str | None:
    checks: tuple[tuple[bool, str], ...] = (
        (info.get("dp_size", 1) > 1, "has data-parallel replicas; run one server per replica and register each."),
        (info.get("pp_size", 1) > 1, "uses pipeline parallelism, which is not supported."),
        (info.get("nnodes", 1) > 1, "spans several nodes, which is not supported."),
        (bool(info.get("speculative_algorithm")), "has a draft model, which is not supported."),
        (bool(info.get("enable_hierarchical_cache")), "has a hierarchical cache, which is not supported."),
    )
    return next((why for bad, why in checks if bad), None)
