"""Why an exchange between ranks failed.

One invariant: every error says which member of the group it is about, where one is to blame, and what to do; none of
them lets a version be installed from the part that did arrive.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import DteError

STORE_HELPS = "The version stays committed; take it from the store, and form a new group."


class P2PError(DteError):
    """Base of what can go wrong between ranks. `member`: number in the group, None where no single one is to blame."""

    code = "p2p"

    def __init__(self, message: str, *, member: int | None = None, remedy: str = STORE_HELPS) -> None:
        super().__init__(message, remedy=remedy)
        self.member = member


class PeerLost(P2PError):
    """The connection to a member broke: its process ended, or it closed its end of the group."""

    code = "p2p-peer-lost"


class ExchangeTimeout(P2PError):
    """A member did not do its share within the deadline."""

    code = "p2p-timeout"


class CarrierClosed(P2PError):
    """This end of the group is closed, or was given up after an error; such a group cannot be used again."""

    code = "p2p-closed"


class PlanMismatch(P2PError):
    """Members computed different plans, so none of them may transfer anything."""

    code = "p2p-plan-mismatch"


class ProtocolError(P2PError):
    """A member sent what the protocol, the plan or the version does not allow."""

    code = "p2p-protocol"


class ExchangeTooLarge(P2PError):
    """What the members announced for a version is more than this receiver accepts to hold in memory."""

    code = "p2p-too-large"


class DeviceShared(P2PError):
    """Two members of an NCCL group sit on one GPU, which NCCL does not allow."""

    code = "p2p-device-shared"


class CarrierUnavailable(P2PError):
    """This build of torch, or this machine, cannot carry the asked kind of group."""

    code = "p2p-unavailable"


class ExchangeFailed(P2PError):
    """A version did not arrive whole. `failures`: what went wrong, by member; other pairs were driven to their end."""

    code = "p2p-exchange-failed"

    def __init__(self, message: str, failures: Mapping[int, P2PError]) -> None:
        super().__init__(message, member=next(iter(failures)) if len(failures) == 1 else None)
        self.failures = dict(failures)
