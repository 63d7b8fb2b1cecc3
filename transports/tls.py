"""What HTTP clients verify servers with."""

from __future__ import annotations

import ssl


def verification(url: str, *, proxies: bool) -> ssl.SSLContext | bool:
    """httpx's `verify` for a client of `url` that may (`proxies`) go through a proxy of the environment.

    A client that never speaks TLS gets a context that trusts nobody: loading the system's authorities takes longer
    than most requests.
    """
    if proxies or url.lower().startswith("https:"):
        return True
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
