"""What is refused when an SGLang server is registered, against a stand-in that answers as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.subscriber.kinds import check_reachable, check_registration
from clients.protocol import ReceiverRegistration
from engine.errors import InvalidInput
from tests.support.sglang_stand_in import StandIn

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Iterator[StandIn]:
    found = StandIn()
    yield found
    found.close()


def registration(url: str | None, **more: Any) -> ReceiverRegistration:
    return ReceiverRegistration(name="actor", kind="sglang", run="r", url=url, **more)


async def test_a_server_that_can_be_driven_is_accepted(server: StandIn) -> None:
    await check_reachable(registration(server.url))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dp_size": 2}, "data-parallel"),
        ({"pp_size": 2}, "pipeline"),
        ({"nnodes": 2}, "several nodes"),
        ({"speculative_algorithm": "EAGLE"}, "draft model"),
        ({"enable_hierarchical_cache": True}, "hierarchical cache"),
        ({"internal_states": [{}]}, "without the dte plugin"),
        ({"internal_states": [{"dte": {"protocol": 1}}]}, "another version"),
        ({"internal_states": [{"dte": {"protocol": 1, "boot": "b", "sockets": [], "error": "no rule"}}]}, "no rule"),
    ],
)
async def test_a_server_that_cannot_is_refused_with_the_reason(
    server: StandIn, change: dict[str, Any], reason: str
) -> None:
    server.info |= change
    with pytest.raises(InvalidInput, match=reason):
        await check_reachable(registration(server.url))


async def test_one_that_does_not_answer_yet_may_come_later() -> None:
    await check_reachable(registration("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("registered", "reason"),
    [
        (registration(None), "url"),
        (registration("ftp://x"), "url"),
        (registration("http://x", sockets=["/a"]), "sockets"),
        (registration("http://x", options={"pause": "never"}), "pause"),
        (registration("http://x", options={"speed": 1}), "speed"),
        (ReceiverRegistration(name="a", run="r", sockets=["/a"], url="http://x"), "torch"),
        (ReceiverRegistration(name="a", run="r", sockets=[]), "sockets"),
    ],
)
async def test_a_registration_that_makes_no_sense_is_refused(registered: ReceiverRegistration, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        check_registration(registered)
