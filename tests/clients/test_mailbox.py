"""What a receiver rank keeps of versions that were sent to it: whole, few, and only for the step they are of."""

from __future__ import annotations

import pytest

from clients.rollout.p2p import KEPT, Mailbox, NotReceived
from clients.rollout.p2p_protocol import Receive
from clients.rollout.protocol import TargetBody

GROUP = "0" * 16


def arrived(version: int, *, base: int | None = None, step: int | None = None, group: str = GROUP) -> Receive:
    return Receive(
        owner="me",
        fence=1,
        group=group,
        epoch=1,
        version=version,
        base=version - 1 if base is None else base,
        step=version if step is None else step,
        bucket_bytes=1,
        max_bytes=1,
        timeout_s=1,
    )


def wanted(version: int, *, base: int | None = None, group: str = GROUP) -> TargetBody:
    return TargetBody(
        run="r",
        version=version,
        step=version,
        base=version - 1 if base is None else base,
        tensors=[],
        base_digests={},
        chunks=[],
        received=group,
    )


def test_a_version_stays_until_it_is_installed() -> None:
    box = Mailbox()
    box.put(arrived(3), ())
    assert box.take(wanted(3)) == ()
    assert box.take(wanted(3)) == ()
    box.drop(3)
    with pytest.raises(NotReceived, match="version 3 was not received"):
        box.take(wanted(3))


def test_the_oldest_go_and_newer_ones_outlast_the_installed_one() -> None:
    box = Mailbox()
    for version in range(1, KEPT + 2):
        box.put(arrived(version), ())
    with pytest.raises(NotReceived):
        box.take(wanted(1))
    box.drop(KEPT)
    assert box.take(wanted(KEPT + 1)) == ()


@pytest.mark.parametrize("other", [arrived(3, step=4), arrived(3, base=1), arrived(3, group="1" * 16)])
def test_another_step_base_or_group_is_not_the_version(other: Receive) -> None:
    box = Mailbox()
    box.put(other, ())
    with pytest.raises(NotReceived):
        box.take(wanted(3))
