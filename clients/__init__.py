"""What runs inside other people's processes: trainers, rollout engines, control planes.

These packages import as `clients`, `engine` and `transports`, names that an application may use itself. So before
anything of ours is imported, this checks that the three names really lead here, and says clearly when they do not.
It imports nothing but the standard library.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

SIBLINGS = ("engine", "transports")


class ShadowedModule(ImportError):
    """A module of somebody else stands where one of ours must be."""


def check_siblings(root: Path | None = None, names: tuple[str, ...] = SIBLINGS) -> None:
    """Raise ShadowedModule if `import <name>` does not lead to the package beside this one.

    `root` is the folder that must hold them (default: where `clients` itself was found). Nothing is imported.
    """
    home = (root or Path(__file__).parent.parent).resolve()
    for name in names:
        found = _location(name)
        if found is None:
            raise ShadowedModule(
                f"the package {name!r} of delta-transfer-engine was not found beside 'clients' in {home}. "
                "Install delta-transfer-engine as a whole.",
                name=name,
            )
        if found.resolve() != home / name:
            raise ShadowedModule(
                f"import {name} leads to {found}, a foreign module that shadows delta-transfer-engine's {name!r} in "
                f"{home}. Rename the foreign one, or put {home} before its folder on sys.path (PYTHONPATH).",
                name=name,
            )


def _location(name: str) -> Path | None:
    """The folder (or file) that `name` is, or would be, imported from. None when there is none."""
    module = sys.modules.get(name)
    if module is not None:
        origin = getattr(module, "__file__", None)
        if origin is not None:
            return _package_dir(Path(origin))
        paths = list(getattr(module, "__path__", []))
        return Path(paths[0]) if paths else Path("<built-in>")
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None) or PathFinder.find_spec
        spec = find_spec(name, None, None)
        if spec is None:
            continue
        if spec.origin is not None:
            return _package_dir(Path(spec.origin))
        places = list(spec.submodule_search_locations or [])
        return Path(places[0]) if places else None
    return None


def _package_dir(origin: Path) -> Path:
    return origin.parent if origin.name == "__init__.py" else origin


check_siblings()
