"""The one place that reads a store's address."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine.errors import InvalidInput
from transports.store.base import ChunkStore
from transports.store.http import HttpStore
from transports.store.local import LocalStore

_REMEDY = "Use a directory, file:///directory, or http(s)://host:port/store."


def open_store(url: str, token: str | None = None) -> ChunkStore:
    """The store at `url`; `token` is sent to remote ones. Nothing is opened before the first use.

    InvalidInput if the address is none we know.
    """
    if "://" not in url:
        if not url:
            raise InvalidInput("the store's address is empty.", remedy=_REMEDY)
        return LocalStore(Path(url))
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme == "file":
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
            raise InvalidInput(f"not a usable file address: {url!r}.", remedy=_REMEDY)
        return LocalStore(Path(path))
    if scheme in ("http", "https"):
        return HttpStore(url, token=token)
    raise InvalidInput(f"no store is known for addresses of scheme {scheme!r}.", remedy=_REMEDY)
