"""A process's end of a group: what it is told is checked before it connects anywhere."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import CodecError, InvalidInput, LayoutError, StateConflict
from engine.records import record_bytes
from engine.records.models import TensorMeta
from transports.p2p.end import GroupEnd, Place, host_port, peers_of
from transports.p2p.errors import CarrierClosed
from transports.p2p.planning import plan_of, read_roster
from transports.p2p.rendezvous import host_store
from transports.p2p.roster import Roster, RosterSlice, RosterTensor

META = TensorMeta(name="w", shape=(8, 4))


def roster(**changes: object) -> Roster:
    halves = [[RosterSlice(slice=0, tensor="w", lanes=16, blocks=[([16], 0, [1], 16 * r, [1])])] for r in range(2)]
    first = RosterTensor(names=["v", "w"], shape=(8, 4), dtype="bfloat16", held=16, blocks=[([16], 0, [1], 0, [1])])
    whole = RosterTensor(names=["w"], shape=(8, 4), dtype="bfloat16", held=32)
    body = {
        "run": "r",
        "epoch": 1,
        "launch": "l",
        "tensors": [META],
        "senders": halves,
        "receivers": [[first], [whole]],
    }
    return Roster.model_validate(body | changes)


def place(path: Path, data: bytes, **changes: object) -> Place:
    path.write_bytes(data)
    body = {
        "group": "0" * 16,
        "address": "127.0.0.1:1",
        "rank": 0,
        "size": 4,
        "side": 0,
        "carrier": "gloo",
        "bind_host": "127.0.0.1",
        "roster": path,
        "roster_sha256": hashlib.sha256(data).hexdigest(),
        "timeout_s": 1.0,
    }
    return Place(**(body | changes))  # type: ignore[arg-type]


def test_members_know_whom_they_exchange_with() -> None:
    plan = plan_of(roster())
    assert plan.pairs == ((0, 0), (0, 1), (1, 1))
    assert [peers_of(plan, rank) for rank in range(4)] == [(2, 3), (3,), (0,), (0, 1)]


def test_a_roster_that_is_another_or_none_is_refused(tmp_path: Path) -> None:
    data = record_bytes(roster())
    good = place(tmp_path / "r", data)
    assert read_roster(good.roster, good.roster_sha256) == roster()
    with pytest.raises(CodecError, match="not the one"):
        GroupEnd().connect(place(tmp_path / "r", data, roster_sha256="0" * 64))
    with pytest.raises(CodecError, match="malformed at senders"):
        GroupEnd().connect(place(tmp_path / "r", b'{"run": "r", "epoch": 1, "launch": "l", "tensors": []}'))
    (tmp_path / "r").unlink()
    with pytest.raises(CodecError, match="cannot be read"):
        read_roster(good.roster, good.roster_sha256)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tensors": [META, META]}, InvalidInput, "twice"),
        ({"senders": [[RosterSlice(slice=0, tensor="x", lanes=4, blocks=[])]]}, InvalidInput, "'x'"),
        ({"senders": [[]]}, LayoutError, "w"),
        (
            {"senders": [[RosterSlice(slice=0, tensor="w", lanes=32, blocks=[([32], 0, [1], 1, [1])])]]},
            LayoutError,
            "reaches",
        ),
        (
            {"receivers": [[RosterTensor(names=["y"], shape=(8, 4), dtype="bfloat16", held=32)]]},
            InvalidInput,
            "'y', which the trainer has not",
        ),
        (
            {"receivers": [[RosterTensor(names=["w"], shape=(4, 8), dtype="bfloat16", held=32)]]},
            InvalidInput,
            r"\[4, 8\]",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_named(changes: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan_of(roster(**changes))


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", "host:99999", ":80", "host:x"])
def test_nonsense_is_no_address(address: str) -> None:
    with pytest.raises(InvalidInput, match="not an address"):
        host_port(address)


def test_addresses() -> None:
    assert host_port("node-1:8000") == ("node-1", 8000)
    assert host_port("[::1]:8000") == ("::1", 8000)


def test_without_a_group_there_is_nothing_to_use_or_to_leave() -> None:
    end = GroupEnd()
    end.leave()
    with pytest.raises(StateConflict, match="not in group"):
        end.seated("0" * 16)


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not visible"):
        GroupEnd().connect(place(tmp_path / "r", record_bytes(roster()), carrier="nccl", device="01234567"))


@pytest.mark.parametrize("named", [True, False])
def test_leaving_ends_a_connect_that_waits_for_others(tmp_path: Path, named: bool) -> None:
    """However long it might have waited: the next group needs this rank now. Leaving another group ends nothing."""
    end = GroupEnd()
    store, port = host_store("127.0.0.1")
    where = place(tmp_path / "r", record_bytes(roster()), address=f"127.0.0.1:{port}", timeout_s=3600.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(end.connect, where)
        while not store.check([f"{where.group}/gather/1/0"]):
            assert not waiting.done()
        end.leave("f" * 16)  # late news of the group before
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        end.leave(where.group if named else None)
        with pytest.raises(CarrierClosed):
            waiting.result(timeout=30)
    with pytest.raises(StateConflict, match="not in group"):
        end.seated(where.group)
