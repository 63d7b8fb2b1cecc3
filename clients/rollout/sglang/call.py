"""What a daemon asks of an engine inside its own update call, and what comes back. Imports no torch.

One invariant: a call names the owner and the fence it acts under, and carries no data: what it installs was prepared
or staged on every rank's socket before.

    POST /update_weights_from_disk {"model_path": <the real one>, "manifest": {"dte": <EngineCall>}}
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field, ValidationError

from clients.protocol import AbsolutePath, Model
from clients.rollout.protocol import ErrorBody, OwnerId, TargetBody
from engine.errors import CodecError
from engine.records.models import Count, RunId, TensorDigest

KEY = "dte"
PLUGIN_PROTOCOL = 1


class EngineCall(Model):
    """`keep_cache`: running requests keep their old KV cache; only what no request holds is dropped."""

    op: Literal["commit", "rollback", "resync", "finalize"]
    run: RunId
    version: Count
    owner: OwnerId
    fence: Count
    keep_cache: bool = False


class EngineAnswer(Model):
    """`phases` by rank, after the call. `error`: the first rank's that refused or failed."""

    phases: list[str]
    error: ErrorBody | None = None


class Stage(Model):
    """Socket operation `stage`: targets of the `resync` call that follows."""

    targets: list[TargetBody] = Field(min_length=1, max_length=10000)


class UnitTensor(TensorDigest):
    """`offset`: of its first byte in the file; its lanes follow one another."""

    offset: Count


class StageUnit(Model):
    """Socket operation `unit`: the tensors of one converter unit at `version`, for the call that follows. The file may
    be gone once this is answered."""

    version: Count
    path: AbsolutePath
    tensors: list[UnitTensor] = Field(min_length=1)


class Hold(Model):
    """Socket operation `hold`: the owner is about to pause the engine (`held`), or has let it continue.

    If the owner is lost, or silent for `patience_s`, the plugin lets the engine continue by itself.
    """

    held: bool
    patience_s: float = Field(default=600.0, gt=0, le=86400)


class Announcement(Model):
    """`internal_states[0].dte` of `GET /server_info`: where the ranks listen, or why they do not."""

    protocol: int
    boot: str
    sockets: list[str]
    error: str | None = None


def parse_call(manifest: object) -> EngineCall | None:
    """The call in a request's manifest; None if there is none. CodecError if it is malformed."""
    if not isinstance(manifest, dict) or KEY not in manifest:
        return None
    try:
        return EngineCall.model_validate(manifest[KEY])
    except ValidationError as error:
        raise CodecError(f"the manifest's {KEY!r} is malformed: {error.errors()[0]['msg']}.") from None


def parse_answer(message: str) -> EngineAnswer:
    """From the engine's free-form message, to which it may have added words of its own."""
    try:
        found, _ = json.JSONDecoder().raw_decode(message)
        return EngineAnswer.model_validate(found[KEY])
    except (ValueError, KeyError, TypeError, ValidationError):
        raise CodecError(f"not an answer of the plugin: {message[:300]!r}.") from None


def answer_text(answer: EngineAnswer) -> str:
    """The message that carries `answer`."""
    return json.dumps({KEY: answer.model_dump(mode="json")})
