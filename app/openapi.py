"""`python -m app.openapi > docs/openapi.json`: the HTTP API as OpenAPI, without starting anything.

Invariant: the same code gives the same bytes, wherever and whenever it runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from app.main import create_app
from app.settings import ROLES, Settings


def export() -> str:
    """The OpenAPI document of a daemon with all roles, as sorted, indented JSON."""
    # The defaults are meant, not this machine's environment; building an application touches no disk.
    settings = Settings.model_construct(
        **{
            **{name: field.get_default(call_default_factory=False) for name, field in Settings.model_fields.items()},
            "roles": frozenset(ROLES),
            "data_dir": Path("data"),
            "detect_threads": 1,
        }
    )
    document = create_app(settings).openapi()
    document["info"]["version"] = "1"  # of the API; the package's version would change the file at every release
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(export())
