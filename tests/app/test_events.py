"""Events reach every follower in order, cost bounded memory, and end with the daemon."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.api import events as api
from app.events import DROPPED, EventBus
from clients.protocol import Event

pytestmark = pytest.mark.anyio


async def take(bus: EventBus, after: int | None, n: int) -> list[Event]:
    found = []
    async for event in bus.subscribe(after):
        found.append(event)
        if len(found) == n:
            break
    return found


async def test_followers_see_every_event_in_order() -> None:
    bus = EventBus(first_id=1)
    followers = [asyncio.ensure_future(take(bus, 0, 20)) for _ in range(3)]
    for i in range(20):
        bus.publish("tick", run="r", n=i)
        if i % 3 == 0:
            await asyncio.sleep(0)
    for events in await asyncio.gather(*followers):
        assert [e.data["n"] for e in events] == list(range(20))
        assert [e.id for e in events] == list(range(1, 21))
        assert {e.kind for e in events} == {"tick"}
        assert {e.run for e in events} == {"r"}


async def test_a_subscription_begins_when_it_is_made_not_when_it_is_first_read() -> None:
    bus = EventBus(first_id=1)
    bus.publish("before")
    stream = bus.subscribe()
    bus.publish("after")
    assert (await anext(stream)).kind == "after"


async def test_a_client_resumes_after_the_last_event_it_saw() -> None:
    bus = EventBus(first_id=1)
    for i in range(5):
        bus.publish("tick", n=i)
    assert [e.id for e in await take(bus, 3, 2)] == [4, 5]


async def test_a_slow_follower_is_told_how_many_events_it_missed() -> None:
    bus = EventBus(history=16, first_id=1)
    slow = bus.subscribe()
    bus.publish("tick", n=0)
    assert (await anext(slow)).data == {"n": 0}
    for i in range(1, 101):
        bus.publish("tick", n=i)
    told = await anext(slow)
    assert told.kind == DROPPED
    assert told.data == {"missed": 84}
    assert [(await anext(slow)).data["n"] for _ in range(16)] == list(range(85, 101))
    bus.publish("tick", n=101)
    assert (await anext(slow)).data["n"] == 101


async def test_a_client_of_an_earlier_life_is_told_that_events_are_unknown() -> None:
    bus = EventBus(first_id=1000)
    bus.publish("tick")
    first, second = await take(bus, 17, 2)
    assert (first.kind, first.data) == (DROPPED, {"missed": None})
    assert (second.kind, second.id) == ("tick", 1000)


async def test_a_number_from_the_future_starts_over() -> None:
    bus = EventBus(first_id=1000)
    assert [e.kind for e in await bus.after(5000, 0)] == [DROPPED]
    bus.publish("tick")
    assert [e.kind for e in await bus.after(5000, 0)] == [DROPPED, "tick"]


async def test_numbers_do_not_go_back_at_a_restart() -> None:
    earlier = EventBus()
    last = earlier.publish("tick").id
    assert EventBus().last_id + 1 >= last


async def test_waiting_ends_at_its_timeout() -> None:
    assert await EventBus().after(EventBus().last_id, 0.0) == []


async def test_closing_ends_followers_after_the_last_event() -> None:
    bus = EventBus(first_id=1)
    idle = asyncio.ensure_future(take(bus, None, 99))
    behind = bus.subscribe()
    await asyncio.sleep(0)
    bus.publish("last")
    bus.close()
    assert [e.kind for e in await idle] == ["last"]
    assert [e.kind async for e in behind] == ["last"]
    assert [e async for e in bus.subscribe()] == []
    assert bus.closed


def parse(raw: bytes) -> list[dict[str, str]]:
    blocks = [b for b in raw.decode().split("\n\n") if b]
    return [dict(line.split(": ", 1) for line in b.split("\n") if not line.startswith(":")) for b in blocks]


async def test_the_stream_has_the_format_browsers_read() -> None:
    bus = EventBus(first_id=1)
    bus.publish("version-committed", run="r", text="line one\nline two", version=3)
    bus.close()
    raw = b"".join([piece async for piece in api.stream(bus, 0, None, 1.0)])
    retry, event = parse(raw)
    assert retry == {"retry": str(api.RETRY_MS)}
    assert event["id"] == "1"
    assert event["event"] == "version-committed"
    body = Event.model_validate_json(event["data"])
    assert body.data == {"text": "line one\nline two", "version": 3}
    assert json.loads(event["data"])["run"] == "r"


async def test_the_stream_can_be_narrowed_to_one_run() -> None:
    bus = EventBus(first_id=1)
    for run in ("a", "b", None, "a"):
        bus.publish("tick", run=run)
    bus.close()
    raw = b"".join([piece async for piece in api.stream(bus, 0, "a", 1.0)])
    assert [e["id"] for e in parse(raw)[1:]] == ["1", "3", "4"]


async def test_a_silent_stream_shows_that_it_lives() -> None:
    stream = api.stream(EventBus(), None, None, 0.0)
    await anext(stream)
    assert (await anext(stream)).startswith(b":")


async def test_a_waiting_follower_can_be_cancelled() -> None:
    bus = EventBus()
    waiting = asyncio.ensure_future(take(bus, None, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
    bus.publish("tick")
