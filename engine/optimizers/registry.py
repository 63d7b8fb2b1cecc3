"""Formulas by name. A `Registry` is an object, so a program can add its own without touching anybody else's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from engine.errors import InvalidInput, UnsupportedOptimizer
from engine.optimizers.adam_cpu import TorchAdamCpu
from engine.optimizers.adam_cuda import TorchAdamCuda
from engine.optimizers.base import Formula
from engine.optimizers.fused_adam import FusedAdam


def builtin_formulas() -> Iterator[Formula]:
    """Every formula this project ships."""
    for tensor_lr in (False, True):
        yield TorchAdamCpu("single", tensor_lr)
        yield TorchAdamCpu("foreach", tensor_lr)
        yield TorchAdamCpu("fused", tensor_lr)
    yield TorchAdamCuda("single", contracted=False)
    for contracted in (False, True):
        yield TorchAdamCuda("foreach", contracted)
        yield TorchAdamCuda("fused", contracted)
        yield TorchAdamCuda("capturable", contracted)
        yield FusedAdam("te", contracted)
        yield FusedAdam("apex", contracted)


class Registry:
    """Names → formulas. Invariant: a name, once registered, always means the same formula."""

    def __init__(self) -> None:
        self._formulas: dict[str, Formula] = {}

    def register(self, formula: Formula) -> None:
        """Add a formula; raises InvalidInput when its name is taken."""
        if formula.name in self._formulas:
            raise InvalidInput(f"formula {formula.name!r} is registered already.", remedy="Give it another name.")
        self._formulas[formula.name] = formula

    def get(self, name: str) -> Formula:
        """The formula of that name; raises UnsupportedOptimizer."""
        try:
            return self._formulas[name]
        except KeyError:
            raise UnsupportedOptimizer(
                f"no formula is known for optimizer {name!r}.",
                remedy="Choose the `snapshot` detector for these tensors, or one of: " + ", ".join(self.names()) + ".",
            ) from None

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._formulas)


def new_registry() -> Registry:
    """A registry of its own with all built-in formulas, to add to."""
    registry = Registry()
    for formula in builtin_formulas():
        registry.register(formula)
    return registry


@lru_cache(maxsize=1)
def _builtin() -> Registry:
    return new_registry()


def get(name: str) -> Formula:
    """A built-in formula by name; raises UnsupportedOptimizer."""
    return _builtin().get(name)


def names() -> list[str]:
    """Names of the built-in formulas, sorted."""
    return _builtin().names()
