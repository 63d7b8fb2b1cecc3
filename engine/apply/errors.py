"""Errors of applying a version. Each one is raised before the first write unless its text says otherwise."""

from __future__ import annotations

from engine.errors import CodecError, InvalidInput, ProofError


class WrongBase(ProofError):
    """The live weights are not those of the version's base. `tensors` names the ones that differ."""

    code = "wrong-base"

    def __init__(self, message: str, tensors: tuple[str, ...], *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.tensors = tensors


class WrongResult(ProofError):
    """Applying the chunks would not give the version's weights."""

    code = "wrong-result"


class LiveChanged(ProofError):
    """Somebody else wrote to the weights between prepare and commit, or after the commit."""

    code = "live-changed"


class ChunkDamaged(CodecError):
    """A local chunk file is missing, or does not have the size and SHA-256 its part declares."""

    code = "chunk-damaged"


class TensorMismatch(InvalidInput):
    """The version and the receiver do not have the same tensors, shapes or dtypes."""

    code = "tensor-mismatch"
