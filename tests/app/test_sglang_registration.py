"""What is refused when an SGLang server is registered, against a stand-in that answers as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.subscriber.kinds import check_reachable, check_registration
from app.subscriber.sglang_server import SglangOptions, SglangServer
from clients.protocol import ReceiverRegistration
from clients.rollout.sglang.call import EngineCall
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


@pytest.mark.parametrize(
    "change",
    [
        {"dp_size": None},
        {"pp_size": "2"},
        {"nnodes": [1]},
        {"internal_states": {"dte": {}}},
        {"internal_states": ["x"]},
        {"internal_states": "x"},
    ],
)
async def test_fields_that_no_sglang_server_has_are_refused(server: StandIn, change: dict[str, Any]) -> None:
    server.info |= change
    with pytest.raises(InvalidInput, match="does not answer as an SGLang server") as refused:
        await check_reachable(registration(server.url))
    assert refused.value.remedy


@pytest.mark.parametrize(
    "raw", [(200, b"<html>hello</html>"), (200, b"[]"), (200, b"\xff\xfe"), (404, b"<html>none</html>"), (302, b"")]
)
async def test_something_else_at_the_address_is_refused(server: StandIn, raw: tuple[int, bytes]) -> None:
    server.raw = raw
    with pytest.raises(InvalidInput, match="does not answer as an SGLang server") as refused:
        await check_reachable(registration(server.url))
    assert refused.value.remedy


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:999999", "http://:80", "http://h:x", "http://h\n", "http://h/?a=b"]
)
async def test_a_url_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="url") as refused:
        check_registration(registration(url))
    assert "http://" in refused.value.remedy


async def test_each_call_carries_the_key_that_it_takes(server: StandIn, tmp_path: Path) -> None:
    for name in ("first", "admin"):
        (tmp_path / name).write_text(f"key-{name}\n")
    both = SglangOptions(api_key_file=tmp_path / "first", admin_api_key_file=tmp_path / "admin")
    for options, asks, changes in (
        (both, "Bearer key-first", "Bearer key-admin"),
        (SglangOptions(api_key_file=tmp_path / "first"), "Bearer key-first", "Bearer key-first"),
        (SglangOptions(admin_api_key_file=tmp_path / "admin"), None, "Bearer key-admin"),
        (SglangOptions(), None, None),
    ):
        client = SglangServer(server.url, options)
        await client.discover()
        await client.pause("retract")
        await client.name_version("1")
        await client.update(EngineCall(op="commit", run="r", version=1, owner="o", fence=1), "1")
        await client.go_on()
        await client.aclose()
        assert [server.keys[p] for p in ("/server_info", "/model_info")] == [asks, asks]
        posts = ("/pause_generation", "/update_weight_version", "/update_weights_from_disk", "/continue_generation")
        assert {server.keys[p] for p in posts} == {changes}


@pytest.mark.parametrize("content", [None, b"\xff"])
async def test_a_key_that_cannot_be_read_is_said(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    options = {"admin_api_key_file": str(tmp_path / "key")}
    with pytest.raises(InvalidInput, match="cannot be read"):
        await check_reachable(registration("http://127.0.0.1:9", options=options))


async def test_a_server_on_this_machine_is_not_asked_through_a_proxy(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens where the proxy is said to be."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = SglangServer(server.url, SglangOptions())
    assert (await client.discover()).boot == "b"
    await client.aclose()
