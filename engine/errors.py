"""The engine's exception tree. Every message says what is wrong; `remedy` says what to do about it."""

from __future__ import annotations


class DteError(Exception):
    """Base of all errors this project raises on purpose.

    `code` is a stable kebab-case identifier (it becomes the problem type of the HTTP API), `remedy` one sentence
    a user can act on.
    """

    code = "error"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class InvalidInput(DteError):
    """A caller passed something that can never work."""

    code = "invalid-input"


class LayoutError(InvalidInput):
    """Blocks that do not fit their tensor, overlap, or leave a gap."""

    code = "layout"


class UnsupportedOptimizer(InvalidInput):
    """No formula is known for this optimizer; the remedy names a detector that works without one."""

    code = "unsupported-optimizer"


class CodecError(DteError):
    """Bytes that are not a well-formed chunk or record, or that exceed their declared or allowed size."""

    code = "corrupt-data"


class ProofError(DteError):
    """A digest did not come out as it must."""

    code = "proof-failed"


class StateConflict(DteError):
    """The request is well-formed but does not fit the present state (wrong epoch, unknown step, wrong base)."""

    code = "state-conflict"
