"""Chain and Committer on a real store: what is read, what is refused, and who wins."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.chain import KEEP_FULL, Chain
from app.committer import Committer
from engine.errors import CodecError, LayoutError, StateConflict
from engine.records import (
    AbortDecision,
    CommitDecision,
    EpochStartDecision,
    keys,
    record_bytes,
    sign,
)
from tests.model.build import RUN, launch_records, part
from transports.errors import ObjectCorrupt
from transports.store.local import LocalStore

pytestmark = pytest.mark.anyio
V0 = ({"w": 1}, {"w": 2})
NONE = {"w": None}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def committer(store: LocalStore, key: bytes | None = None) -> Committer:
    return Committer(Chain(RUN, store, signing_key=key, poll_interval_s=0.01))


async def announce(c: Committer, launch: str, values=V0, step: int = 0) -> None:
    for record in launch_records(launch, values, step=step):
        await c.announce(record)


async def publish(c: Committer, version, old, new, *, step=1, epoch=1, launch="one", dense=False, writers=(0, 1)):
    head = c.chain.head
    for w in writers:
        await c.put_part(
            part(
                version,
                epoch,
                w,
                launch=launch,
                step=step,
                base=None if head is None else head.version,
                old=old[w],
                new=new[w],
                dense=dense,
            )
        )
    return await c.try_commit(version)


async def first(c: Committer, launch: str = "one"):
    await announce(c, launch)
    assert await c.try_open(launch)
    return await publish(c, 0, (NONE, NONE), V0, step=0, launch=launch, dense=True)


async def test_the_first_launch_opens_once_all_ranks_are_there(store):
    c = committer(store)
    records = launch_records("one", V0)
    assert c.chain.epoch is None
    await c.announce(records[1])
    assert await c.try_open("one") is None
    await c.announce(records[0])
    opened = await c.try_open("one")
    assert (opened.epoch, opened.world, opened.base, opened.differs, opened.next_version) == (1, 2, None, None, 0)
    assert c.chain.epoch == 1
    assert (await c.epoch_launch(1)).launch == "one"


async def test_a_version_commits_when_the_last_part_is_put(store):
    c = committer(store)
    await announce(c, "one")
    await c.try_open("one")
    assert await publish(c, 0, (NONE, NONE), V0, step=0, dense=True, writers=(0,)) is None
    decision = await publish(c, 0, (NONE, NONE), V0, step=0, dense=True, writers=(1,))
    assert isinstance(decision, CommitDecision)
    reader = Chain(RUN, store)
    assert [d.version for d in await reader.refresh()] == [0]
    assert reader.head == decision
    assert (await reader.part(decision.parts[1])).writer == 1
    assert sorted(await reader.parts(0, 1)) == [0, 1]


async def test_many_committers_at_once_write_one_decision(store):
    many = [committer(store) for _ in range(6)]
    await announce(many[0], "one")
    opened = await asyncio.gather(*(c.try_open("one") for c in many))
    assert {o.epoch for o in opened} == {1}
    await publish(many[0], 0, (NONE, NONE), V0, step=0, dense=True, writers=(0,))
    await many[0].put_part(part(0, 1, 1, launch="one", step=0, base=None, old=NONE, new=V0[1], dense=True))
    decisions = await asyncio.gather(*(c.try_commit(0) for c in many))
    assert len({record_bytes(d) for d in decisions}) == 1


async def test_a_new_launch_gets_one_epoch_however_many_daemons_open_it(store):
    await first(committer(store))
    many = [committer(store) for _ in range(6)]
    await announce(many[0], "two", ({"w": 1}, {"w": 9}), step=7)
    opened = await asyncio.gather(*(c.try_open("two") for c in many))
    assert {(o.epoch, o.base.version, o.differs, o.next_version) for o in opened} == {(2, 0, frozenset({"w"}), 2)}
    chain = Chain(RUN, store)
    await chain.refresh()
    assert [d.kind for d in chain.decisions.values()] == ["commit", "epoch-start"]
    assert len(await chain.refresh_epochs()) == 2


async def test_opening_adopts_a_complete_version_whose_committer_died(store):
    old = committer(store)
    await first(old)
    for w, (was, now) in enumerate((({"w": 1}, {"w": 5}), ({"w": 2}, {"w": 2}))):
        await old.put_part(part(1, 1, w, launch="one", step=1, base=0, old=was, new=now))
    new = committer(store)
    await announce(new, "two", ({"w": 5}, {"w": 2}), step=1)
    opened = await new.try_open("two")
    assert (opened.base.version, opened.base.epoch, opened.differs, opened.next_version) == (1, 1, frozenset(), 3)


async def test_a_damaged_part_does_not_keep_a_new_launch_from_opening(store):
    old, new = committer(store), committer(store)
    await first(old)
    await old.put_part(part(1, 1, 0, launch="one", step=1, base=0, old={"w": 1}, new={"w": 5}))
    await store.put(keys.part(RUN, 1, 1, 1), b"{")
    with pytest.raises(CodecError, match=r"parts/1-1\.json"):
        await old.try_commit(1)
    await announce(new, "two")
    opened = await new.try_open("two")
    assert (opened.epoch, opened.base.version, opened.next_version) == (2, 0, 2)


async def test_an_old_epoch_is_fenced(store):
    old, new = committer(store), committer(store)
    await first(old)
    await old.put_part(part(1, 1, 0, launch="one", step=1, base=0, old={"w": 1}, new={"w": 5}))
    await announce(new, "two")
    await new.try_open("two")
    late = part(1, 1, 1, launch="one", step=1, base=0, old={"w": 2}, new={"w": 6})
    await old.put_part(late)
    assert isinstance(await old.try_commit(1), EpochStartDecision)
    with pytest.raises(StateConflict, match="superseded by epoch 2"):
        await old.try_open("one")
    with pytest.raises(StateConflict, match="cannot abort"):
        await old.abort(2, 1, "revoked")
    for w in (0, 1):
        await old.put_part(part(2, 1, w, launch="one", step=2, base=0, old={"w": 1 + w}, new={"w": 7}))
    assert await old.try_commit(2) is None


async def test_a_decision_of_an_old_epoch_spends_its_number_and_nothing_else(store):
    c = committer(store)
    v0 = await first(c)
    await announce(c, "two")
    await c.try_open("two")
    zombie = v0.model_copy(update={"version": 2, "base": 0})
    await store.put_if_absent(keys.decision(RUN, 2), record_bytes(zombie))
    assert await c.try_commit(2) == AbortDecision(run=RUN, version=2, epoch=1, reason="superseded")
    assert (c.chain.head.version, c.chain.next_version, sorted(c.chain.decisions)) == (0, 3, [0, 1])


async def test_abort_says_what_stands(store):
    c, other = committer(store), committer(store)
    await first(c)
    aborted = await c.abort(1, 1, "revoked")
    assert aborted.reason == "revoked"
    assert await other.abort(1, 1, "spool-lost") == aborted
    assert await other.try_commit(1) == aborted
    assert isinstance(await other.abort(0, 1, "revoked"), CommitDecision)
    with pytest.raises(StateConflict):
        await c.abort(5, 1, "revoked")


class OvertakenStore(LocalStore):
    """Another process aborts version 1 just after somebody has listed its parts."""

    async def list(self, prefix: str):
        async for key in super().list(prefix):
            yield key
        if prefix == keys.parts_prefix(RUN, 1):
            abort = AbortDecision(run=RUN, version=1, epoch=1, reason="revoked")
            await self.put_if_absent(keys.decision(RUN, 1), record_bytes(abort))


async def test_a_committer_that_stalls_before_its_write_changes_nothing(tmp_path):
    store = OvertakenStore(tmp_path / "store")
    c = committer(store)
    await first(c)
    decision = await publish(c, 1, V0, ({"w": 5}, {"w": 6}))
    assert decision.reason == "revoked"
    again = Chain(RUN, LocalStore(tmp_path / "store"))
    await again.refresh()
    assert again.standing(1) == decision


async def test_an_opener_that_stalls_before_its_write_goes_one_number_on(tmp_path):
    store = OvertakenStore(tmp_path / "store")
    c = committer(store)
    await first(c)
    await announce(c, "two")
    opened = await c.try_open("two")
    assert (opened.base.version, opened.next_version) == (0, 3)
    assert [d.kind for d in c.chain.decisions.values()] == ["commit", "abort", "epoch-start"]


async def test_an_earlier_part_of_the_same_writer_stands(store):
    c = committer(store)
    await announce(c, "one")
    await c.try_open("one")
    mine = part(0, 1, 0, launch="one", step=0, base=None, old=NONE, new=V0[0], dense=True)
    assert await c.put_part(mine) == mine
    assert await c.put_part(mine.model_copy(update={"step": 3})) == mine


async def test_parts_of_different_steps_end_as_rejected(store):
    c = committer(store)
    await first(c)
    await publish(c, 1, V0, ({"w": 5}, {"w": 6}), step=1, writers=(0,))
    decision = await publish(c, 1, V0, ({"w": 5}, {"w": 6}), step=2, writers=(1,))
    assert decision.reason == "rejected"
    assert isinstance(await publish(c, 2, V0, ({"w": 5}, {"w": 6}), step=2), CommitDecision)


async def test_a_restarted_rank_may_announce_again_but_not_with_other_slices(store):
    c = committer(store)
    await announce(c, "one")
    later = launch_records("one", ({"w": 8}, {"w": 9}), step=3)[0]
    assert (await c.announce(later)).step == 0
    with pytest.raises(StateConflict, match="other tensors or slices"):
        await c.announce(launch_records("one", ({"x": 8}, {"x": 9}))[0])


async def test_a_wrong_cover_claims_no_epoch(store):
    c = committer(store)
    records = launch_records("one", V0)
    await c.announce(records[0])
    await c.announce(records[1].model_copy(update={"slices": []}))
    with pytest.raises(LayoutError, match=r"\[8, 16\)"):
        await c.try_open("one")
    assert await c.chain.refresh_epochs() == []


async def test_another_model_claims_no_epoch(store):
    c = committer(store)
    await first(c)
    await announce(c, "two", ({"x": 1}, {"x": 2}))
    with pytest.raises(StateConflict, match="new run identifier"):
        await c.try_open("two")
    assert len(await c.chain.refresh_epochs()) == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b'{"kind":"commit"}', "wrong-run", "wrong-number"],
    ids=["empty", "cut", "null", "fields-missing", "wrong-run", "wrong-number"],
)
async def test_a_corrupt_decision_stops_the_chain_and_names_the_object(store, data):
    c = committer(store)
    await first(c)
    if isinstance(data, str):
        change = {"run": "other"} if data == "wrong-run" else {"version": 7}
        good = AbortDecision(run=RUN, version=1, epoch=1, reason="revoked")
        data = record_bytes(good.model_copy(update=change))
    await store.put(keys.decision(RUN, 1), data)
    await store.put(keys.decision(RUN, 2), record_bytes(AbortDecision(run=RUN, version=2, epoch=1, reason="revoked")))
    with pytest.raises(CodecError, match=r"versions/1/decision\.json cannot be used, and nothing after it"):
        await c.chain.refresh()
    assert c.chain.next_version == 1


async def test_decisions_must_carry_the_runs_signature(store):
    key = b"secret"
    await first(committer(store, key))
    signed, unsigned, other = committer(store, key), committer(store), committer(store, b"another")
    await signed.chain.refresh()
    assert signed.chain.head.hmac
    await unsigned.chain.refresh()
    with pytest.raises(CodecError, match="signature"):
        await other.chain.refresh()
    abort = AbortDecision(run=RUN, version=1, epoch=1, reason="revoked")
    await store.put(keys.decision(RUN, 1), record_bytes(sign(abort, b"another")))
    with pytest.raises(CodecError, match="signature"):
        await signed.chain.refresh()


async def test_a_part_must_have_the_hash_the_decision_names(store):
    c = committer(store)
    commit = await first(c)
    reader = Chain(RUN, store)
    await store.put(
        commit.parts[0].key, record_bytes((await c.chain.part(commit.parts[0])).model_copy(update={"step": 9}))
    )
    with pytest.raises(ObjectCorrupt, match=r"parts/1-0\.json"):
        await reader.part(commit.parts[0])


async def walk(c: Committer, count: int) -> None:
    values = V0
    for version in range(1, count):
        new = ({"w": 10 + version}, {"w": 20 + version})
        assert isinstance(await publish(c, version, values, new, step=version), CommitDecision)
        values = new


async def test_paths_lead_from_base_to_target_or_are_refused(store):
    c = committer(store)
    await first(c)
    await walk(c, 4)
    chain = c.chain
    assert [d.version for d in chain.path(None, 3)] == [0, 1, 2, 3]
    assert [d.version for d in chain.path(1, 3)] == [2, 3]
    assert chain.path(3, 3) == []
    for base, target in ((3, 1), (9, 3), (0, 9)):
        with pytest.raises(StateConflict):
            chain.path(base, target)


async def test_old_decisions_are_kept_small_and_come_back_whole(store):
    c = committer(store)
    v0 = await first(c)
    await walk(c, KEEP_FULL + 3)
    chain = Chain(RUN, store)
    await chain.refresh()
    assert [bool(d.tensors) for d in chain.commits()] == [False] * 3 + [True] * KEEP_FULL
    assert await chain.full(0) == v0
    assert chain.decision_sha256(0) == c.chain.decision_sha256(0)
    await store.put(keys.decision(RUN, 1), record_bytes(v0.model_copy(update={"version": 1, "step": 77})))
    with pytest.raises(CodecError, match="vanished or changed"):
        await chain.full(1)
    with pytest.raises(StateConflict):
        await chain.full(99)


async def test_waiters_wake_on_local_news_and_on_polls_and_give_up_in_time(store):
    local, remote = committer(store), Chain(RUN, store, poll_interval_s=0.01)
    waiting = [asyncio.create_task(chain.wait(0, 60)) for chain in (local.chain, remote)]
    await first(local)
    assert await asyncio.gather(*waiting) == [True, True]
    assert remote.head.version == 0
    assert await remote.wait(1, 0.0) is False
    assert await remote.wait(0, 0.0) is True


async def test_refresh_returns_to_each_caller_what_was_new_to_it(store):
    await first(committer(store))
    chain = Chain(RUN, store)
    seen = await asyncio.gather(chain.refresh(), chain.refresh())
    assert [[d.version for d in s] for s in seen] == [[0], [0]]
    assert await chain.refresh() == []
