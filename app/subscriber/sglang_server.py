"""What the daemon says to an SGLang server over HTTP: who are you, pause, update, continue.

One invariant: an answer is either understood or an error; a connection that ends is a receiver that is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

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
    """`options` of a registration. `pause`: what becomes of running requests. `api_key_file`: has the server's key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pause: PauseMode = "retract"
    api_key_file: Path | None = None
    timeout_s: float = 600.0


class SglangServer:
    """One server. ReceiverGone if it does not answer, InvalidInput if it cannot be driven."""

    def __init__(self, url: str, options: SglangOptions) -> None:
        self._url = url.rstrip("/")
        headers = {}
        if options.api_key_file is not None:
            try:
                headers["Authorization"] = f"Bearer {options.api_key_file.read_text().strip()}"
            except OSError as error:
                raise InvalidInput(f"the server's API key cannot be read: {error}.") from None
        self._http = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=httpx.Timeout(60.0, connect=5.0))
        self._timeout_s = options.timeout_s
        self._model_path = ""

    async def aclose(self) -> None:
        await self._http.aclose()

    async def discover(self) -> Announcement:
        """Where the server's ranks listen."""
        info = await self._json("GET", "/server_info")
        refused = _unsupported(info)
        if refused is not None:
            raise InvalidInput(
                f"the server at {self._url} {refused}", remedy="See docs/sglang.md for what is supported."
            )
        states = info.get("internal_states") or [{}]
        found = states[0].get(KEY) if isinstance(states[0], dict) else None
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
                raise InvalidInput(text, remedy="Give the server's key with the option `api_key_file`.")
            if response.status_code >= 500:
                raise ReceiverGone(text)
            raise ReceiverError(text)
        try:
            found = response.json()
        except ValueError:
            raise InvalidInput(f"{path} of {self._url} is not JSON: is it an SGLang server?") from None
        return found if isinstance(found, dict) else {}

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body, timeout=httpx.Timeout(timeout_s, connect=5.0))
        except httpx.HTTPError as error:
            raise ReceiverGone(f"{self._url}{path} does not answer: {type(error).__name__}: {error}") from None


def _unsupported(info: dict[str, Any]) -> str | None:
    checks: tuple[tuple[bool, str], ...] = (
        (info.get("dp_size", 1) > 1, "has data-parallel replicas; run one server per replica and register each."),
        (info.get("pp_size", 1) > 1, "uses pipeline parallelism, which is not supported."),
        (info.get("nnodes", 1) > 1, "spans several nodes, which is not supported."),
        (bool(info.get("speculative_algorithm")), "has a draft model, which is not supported."),
        (bool(info.get("enable_hierarchical_cache")), "has a hierarchical cache, which is not supported."),
    )
    return next((why for bad, why in checks if bad), None)
