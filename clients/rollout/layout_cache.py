"""Layouts found once are kept on disk: a server that starts again need not probe again.

One invariant: what comes out is what was put in for exactly this model configuration, parallel shape and set of engine
flags, checked again as untrusted input; anything else is a miss. It is a shortcut, never a proof: the digest of the
live weights confirms a layout wherever it came from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.errors import LayoutError
from engine.layout.placement import Placement
from engine.probe import Probed
from engine.records.models import TensorMeta

log = logging.getLogger(__name__)

SCHEMA = 2
MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class LayoutKey:
    """Everything a layout depends on.

    `config`: the model's configuration. `shape`: the parallel sizes and this rank's coordinates. `flags`: the engine's
    name, version and every setting that changes how it stores weights. `tensors`: the canonical tensors.
    """

    config: Mapping[str, Any]
    shape: Mapping[str, int]
    flags: Mapping[str, Any]
    tensors: Sequence[TensorMeta]

    def digest(self) -> str:
        """SHA-256 of the key as canonical JSON, 64 hex digits. TypeError if something in it is no JSON."""
        fields = {
            "schema": SCHEMA,
            "config": dict(self.config),
            "shape": dict(self.shape),
            "flags": dict(self.flags),
            "tensors": sorted([t.name, list(t.shape), t.dtype] for t in self.tensors),
        }
        return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class LayoutCache:
    """Probed layouts as files in `directory`, one a key, written whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: LayoutKey) -> Probed | None:
        """What was put for the key; None, with a warning in the log, if the file cannot be used."""
        path = self._path(key)
        try:
            with path.open("rb") as handle:
                data = handle.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise LayoutError(f"it has more than {MAX_FILE_BYTES} bytes.")
            return _parse(json.loads(data), key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LayoutError, ValidationError) as error:
            log.warning("cached layouts %s cannot be used and are found anew: %s", path, error)
            return None

    def put(self, key: LayoutKey, found: Probed) -> None:
        """Keep it. OSError if the directory cannot be written."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        body = {
            "schema": SCHEMA,
            "key": key.digest(),
            "placements": {n: [p.to_json() for p in ps] for n, ps in found.placements.items()},
            "aliases": found.aliases,
            "not_identity": found.not_identity,
            "absent": sorted(found.absent),
            "unwritten": found.unwritten,
            "retyped": {n: [p.to_json() for p in ps] for n, ps in found.retyped.items()},
            "mixed": found.mixed,
        }
        handle, name = tempfile.mkstemp(prefix=".layout-", dir=self._directory)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(body, file, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _path(self, key: LayoutKey) -> Path:
        return self._directory / f"{key.digest()}.json"


def _parse(body: object, key: LayoutKey) -> Probed:
    if not isinstance(body, dict) or body.get("schema") != SCHEMA or body.get("key") != key.digest():
        raise LayoutError("it was written for something else.")
    known = {t.name: t for t in key.tensors}
    places: list[dict[str, list[Placement]]] = [{}, {}]
    for found, field in zip(places, ("placements", "retyped"), strict=True):
        for name, values in _table(body, field, list).items():
            found[name] = [Placement.from_json(v) for v in values]
            for p in found[name]:
                if known.get(p.tensor.name) != p.tensor:
                    raise LayoutError(f"it places {p.tensor.name!r}, which is no tensor of this model in that form.")
    mixed = _table(body, "mixed", list)
    if not all(n in known for names in mixed.values() for n in names):
        raise LayoutError("it mixes tensors that the model has not.")
    absent = body.get("absent")
    if not isinstance(absent, list) or not all(isinstance(n, str) for n in absent):
        raise LayoutError("its list of absent tensors is malformed.")
    return Probed(
        places[0],
        _table(body, "aliases", str),
        _table(body, "not_identity", str),
        frozenset(absent),
        _table(body, "unwritten", int),
        places[1],
        mixed,
    )


def _table(body: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    table = body.get(name)
    if not isinstance(table, dict) or not all(type(v) is kind for v in table.values()):
        raise LayoutError(f"its {name} are malformed.")
    return table
