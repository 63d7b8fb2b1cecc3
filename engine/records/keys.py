"""The one place that spells store keys. Every key is relative, made of safe segments, and can be parsed back."""

from __future__ import annotations

import re

from engine.errors import InvalidInput

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
MAX_KEY_LENGTH = 1024


def check_key(key: str) -> str:
    """Return `key` if it is a safe store key, else raise InvalidInput.

    Segments are separated by single slashes and match `[A-Za-z0-9][A-Za-z0-9._-]*`, so no segment can be empty, `.`,
    `..`, hidden, absolute, or hold a backslash, a NUL or a percent sign.
    """
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not all(_SEGMENT.fullmatch(s) for s in key.split("/")):
        raise InvalidInput(
            f"not a valid store key: {key[:80]!r}.",
            remedy="Use slash-separated segments of letters, digits, '.', '_' and '-', each starting alphanumeric.",
        )
    return key


def run_prefix(run: str) -> str:
    return f"runs/{run}/"


def launch(run: str, launch_id: str, rank: int) -> str:
    return f"runs/{run}/launches/{launch_id}/{rank}.json"


def launch_prefix(run: str, launch_id: str) -> str:
    return f"runs/{run}/launches/{launch_id}/"


def epoch(run: str, number: int) -> str:
    return f"runs/{run}/epochs/{number}.json"


def version_prefix(run: str, version: int) -> str:
    return f"runs/{run}/versions/{version}/"


def decision(run: str, version: int) -> str:
    return f"runs/{run}/versions/{version}/decision.json"


def parts_prefix(run: str, version: int) -> str:
    return f"runs/{run}/versions/{version}/parts/"


def part(run: str, version: int, epoch_number: int, writer: int) -> str:
    return f"runs/{run}/versions/{version}/parts/{epoch_number}-{writer}.json"


def chunk(run: str, version: int, epoch_number: int, writer: int, seq: int, sha256: str) -> str:
    return f"runs/{run}/versions/{version}/chunks/{epoch_number}-{writer}-{seq}-{sha256[:32]}.dtc"


def anchor_manifest(run: str, version: int) -> str:
    return f"runs/{run}/anchors/{version}/manifest.json"


def anchor_prefix(run: str) -> str:
    return f"runs/{run}/anchors/"


def anchor_chunk(run: str, version: int, seq: int, sha256: str) -> str:
    return f"runs/{run}/anchors/{version}/{seq}-{sha256[:32]}.dtc"


def latest(run: str) -> str:
    return f"runs/{run}/latest.json"


def requests_prefix(run: str) -> str:
    return f"runs/{run}/requests/"


def dense_request(run: str, version: int) -> str:
    return f"runs/{run}/requests/dense-{version}.json"


def parse_dense_request(key: str) -> int | None:
    """The version a request for a dense version was made at; None if the key is not such a request's."""
    m = re.search(r"/requests/dense-(0|[1-9]\d{0,18})\.json$", key)
    return None if m is None else int(m[1])


def parse_part(key: str) -> tuple[int, int]:
    """(epoch, writer) of a part key; InvalidInput if it is not one."""
    m = re.search(r"/parts/(\d+)-(\d+)\.json$", key)
    if not m:
        raise InvalidInput(f"not a part key: {key!r}.")
    return int(m[1]), int(m[2])
