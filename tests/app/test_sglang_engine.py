"""`SglangEngine` and `Engine` against stand-ins of the server and its rank, where a real one cannot be made to fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from app.subscriber.engine import Engine
from app.subscriber.sglang import SglangEngine
from app.subscriber.targets import Targets
from app.subscriber.units import UnitFiles
from clients.protocol import ReceiverRegistration
from clients.rollout.protocol import ErrorBody, ReceiverError, TargetBody
from clients.rollout.sglang.call import EngineAnswer
from tests.support.sglang_stand_in import GOOD, Rank, StandIn

pytestmark = pytest.mark.anyio

NOTHING = UnitFiles(cast(Targets, None), Path("/nowhere"), max_bytes=0)


@pytest.fixture
async def rank(tmp_path: Path) -> AsyncIterator[Rank]:
    async with Rank(tmp_path / "rank.sock") as found:
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    found = StandIn()
    announced = {"protocol": 1, "boot": "b", "sockets": [str(tmp_path / "rank.sock")], "error": None}
    found.info = GOOD | {"internal_states": [{"dte": announced}]}
    yield found
    found.close()


async def reach(server: StandIn, **options: Any) -> SglangEngine:
    said = ReceiverRegistration(name="a", kind="sglang", run="r", url=server.url, options=options)
    engine = await SglangEngine.reach(said, owner="me", fence=1, files=NOTHING)
    assert isinstance(engine, SglangEngine)
    return engine


def failing(*ops: str, code: str = "undo-failed") -> Any:
    def update(call: dict[str, Any]) -> EngineAnswer:
        error = ErrorBody(code=code, message="a loader broke") if call["op"] in ops else None
        return EngineAnswer(phases=["clean"], error=error)

    return update


def target(version: int) -> TargetBody:
    return TargetBody(run="r", version=version, step=0, base=None, tensors=[], base_digests=None, chunks=[])


@pytest.mark.parametrize("code", ["undo-failed", "half-written"])
@pytest.mark.parametrize("after", ["written", "clean"])
async def test_a_rollback_that_fails_leads_to_a_resync(server: StandIn, rank: Rank, code: str, after: str) -> None:
    rank.status["phase"] = "written"

    def update(call: dict[str, Any]) -> EngineAnswer:
        rank.status["phase"] = after if call["op"] == "rollback" else "clean"
        return cast(EngineAnswer, failing("rollback", code=code)(call))

    server.update = update
    engine = await reach(server)
    assert engine.dirty
    assert server.ops() == ["pause-retract", "rollback"], "an engine between two versions stays paused"
    await engine.resync([target(3)])
    assert not engine.dirty
    assert server.ops()[-1] == "continue"
    await engine.aclose()


async def test_a_rollback_that_fails_on_a_plain_rank_leads_to_a_resync_too(rank: Rank) -> None:
    rank.status["phase"] = "written"
    rank.refuse["rollback"] = [ReceiverError("no undo", code="undo-failed")]
    engine = await Engine.connect("r", [str(rank.path)], owner="me", fence=1)
    assert engine.dirty
    await engine.aclose()
    rank.refuse["rollback"] = [ReceiverError("another owner", code="fenced-off")]
    with pytest.raises(ReceiverError, match="another owner"):
        await Engine.connect("r", [str(rank.path)], owner="me", fence=1)


async def test_what_fails_while_letting_the_engine_go_on_hides_no_other_error(server: StandIn, rank: Rank) -> None:
    engine = await reach(server)
    server.update = failing("commit", code="live-changed")
    rank.refuse["status"] = [ReceiverError("a newer daemon", code="fenced-off")]
    with pytest.raises(ReceiverError) as refused:
        await engine._write(1, engine._links)
    assert refused.value.code == "live-changed"
    assert server.ops() == ["pause-retract", "commit"], "the engine is the newer daemon's to continue"
    server.statuses["/continue_generation"] = 400
    with pytest.raises(ReceiverError) as refused:
        await engine._write(1, engine._links)
    assert refused.value.code == "live-changed"
    await engine.aclose()


async def test_an_engine_that_was_taken_over_while_it_was_paused_is_left_alone(server: StandIn, rank: Rank) -> None:
    engine = await reach(server)
    rank.refuse["status"] = [ReceiverError("a newer daemon", code="fenced-off")]
    with pytest.raises(ReceiverError) as refused:
        await engine._write(1, engine._links)
    assert refused.value.code == "fenced-off"
    assert server.ops() == ["pause-retract", "commit"]
    assert rank.seen.count("hold") == 1
    await engine.aclose()


@pytest.mark.parametrize("pause", ["abort", "in_place"])
async def test_the_option_is_for_commits_and_a_resync_retracts(server: StandIn, rank: Rank, pause: str) -> None:
    rank.status["phase"] = "written"

    def update(call: dict[str, Any]) -> EngineAnswer:
        rank.status["phase"] = "clean"
        return EngineAnswer(phases=["clean"])

    server.update = update
    engine = await reach(server, pause=pause)
    await engine.resync([target(3)])
    await engine._write(4, engine._links)
    assert server.ops() == [
        "pause-retract", "rollback", "continue",
        "pause-retract", "resync", "finalize", "continue",
        f"pause-{pause}", "commit", "continue",
    ]  # fmt: skip
    calls = [body["manifest"]["dte"] for path, body in server.said if path == "/update_weights_from_disk"]
    assert {c["op"] for c in calls if c["keep_cache"]} == ({"commit"} if pause == "in_place" else set())
    await engine.aclose()
