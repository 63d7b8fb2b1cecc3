"""The receiver core of one scheduler rank: what the ordinary core does, and the same for tensors that are converted.

One invariant: the rank says it is at a version only if both its identity bits and its converter units are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from clients.rollout import protocol as p
from clients.rollout.core import ReceiverCore, Weights
from clients.rollout.sglang.call import StageUnit
from clients.rollout.sglang.converter import Converter
from engine.records.models import TensorDigest


class EngineCore(ReceiverCore):
    """Tells when its owner comes and goes, and prepares `converter` for what the engine's update call then writes."""

    on_owner: Callable[[bool], None] = staticmethod(lambda present: None)

    def __init__(self, weights: Weights, converter: Converter, **more: Any) -> None:
        self.converter = converter
        super().__init__(weights, **more)

    @property
    def dirty(self) -> bool:
        """True while the weights may be between two versions."""
        return self.phase.dirty or self.converter.dirty

    def describe(self, body: p.Empty) -> p.Description:
        return super().describe(body).model_copy(update={"units": self.converter.describe()})

    def status(self, body: p.Empty | None = None) -> p.Status:
        found = super().status(body)
        if self.converter.at(found.version):
            return found
        return found.model_copy(update={"version": None, "step": None, "ready": False})

    def adopt(self, body: p.Adopt) -> p.Status:
        """If the converted tensors are not that version, `status` says null until they have been converted."""
        with self._op:
            super().adopt(body)
            self.converter.drop()
            if not self.converter.is_of(_digests(body.tensors)):
                self.converter.forget()
            if self.converter.written_by_others() is not None or not self.converter.at(body.version):
                self.converter.aim(body.version, body.tensors, None)
            return self.status()

    def prepare(self, body: p.Prepare) -> p.Prepared:
        target = body.target
        with self._op:
            self.converter.drop()
            found = super().prepare(body)
            try:
                if found.already:
                    self.converter.check(target.version, _digests(target.tensors))
                else:
                    self.converter.check(target.base, target.base_digests or {})
                if not found.already:
                    self.converter.aim(target.version, target.tensors, target.base_digests)
            except BaseException:
                if not found.already:
                    super().abort()
                raise
            return found

    def follow(self, run: str | None) -> None:
        with self._op:
            before = self.run
            super().follow(run)
            if self.run != before:
                self.converter.forget()

    def abort(self, body: p.Empty | None = None) -> p.Status:
        with self._op:
            self.converter.drop()
            return super().abort(body)

    def stage_unit(self, body: StageUnit) -> p.Status:
        """Socket operation `unit`."""
        with self._op:
            self.converter.stage(body)
            return self.status()

    def owner_present(self) -> None:
        super().owner_present()
        self.on_owner(True)

    def owner_lost(self) -> None:
        super().owner_lost()
        self.on_owner(False)


def _digests(tensors: Iterable[TensorDigest]) -> dict[str, str]:
    return {t.name: t.digest for t in tensors}
