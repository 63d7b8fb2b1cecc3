"""The plugin's rank without an engine around it: one update call is a commit of everything or of nothing."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from clients.rollout import protocol as p
from clients.rollout.core import ReceiverCore
from clients.rollout.server import ReceiverServer
from clients.rollout.sglang.call import EngineAnswer, EngineCall, Hold, Stage, answer_text, parse_answer, parse_call
from clients.rollout.sglang.converter import Converter
from clients.rollout.sglang.layouts import Found
from clients.rollout.sglang.plugin import Plugin
from clients.rollout.sglang.rank import REPORT_BYTES, PauseWatch, SglangRank, _short, plain
from clients.rollout.sglang.weights import EngineWeights
from engine.apply import Target
from engine.errors import CodecError, InvalidInput, StateConflict
from engine.layout.algebra import contiguous
from engine.layout.blocks import Layout
from engine.layout.placement import Placement
from tests.support.versions import State, changed, local_target, metas_of
from tests.support.views import PretendTensor, pretending

METAS = metas_of({"a": ((6, 8), "bfloat16"), "b": ((4, 8), "bfloat16"), "n": ((8,), "float32")})
PADDING = 2


def state_of(seed: int) -> State:
    rng = np.random.default_rng(seed)
    lanes = {"a": 48, "b": 32, "n": 16}
    return {n: rng.integers(0, 1 << 16, size).astype(np.uint16) for n, size in lanes.items()}


def build(state: State) -> tuple[nn.Module, dict[str, list[Placement]]]:
    """`a` and `b` stacked in one parameter, with padding behind them."""
    rows = 6 + 4 + PADDING
    model = nn.Module()
    model.ab = nn.Parameter(torch.zeros(rows, 8, dtype=torch.bfloat16), requires_grad=False)
    model.n = nn.Parameter(torch.zeros(8), requires_grad=False)
    ab, n = lanes_of(model)
    ab[:48], ab[48:80], n[:] = state["a"], state["b"], state["n"]
    whole = rows * 8

    def at(first: int, numel: int) -> Layout:
        block = contiguous(0, numel, numel).blocks[0]
        return Layout((type(block)(block.shape, first, block.src_strides, 0, block.dst_strides),), whole, numel)

    placed = {
        "ab": [Placement(METAS[0], at(0, 48)), Placement(METAS[1], at(48, 32))],
        "n": [Placement(METAS[2], contiguous(0, 8, 8))],
    }
    return model, placed


def lanes_of(model: nn.Module) -> tuple[Any, Any]:
    """Live memory of both parameters as 16-bit words."""
    return tuple(
        model.get_parameter(n).detach().view(-1).view(torch.int16).numpy().view(np.uint16) for n in ("ab", "n")
    )


@dataclass
class FakeHost:
    idle: bool = True
    fail_flush: bool = False
    fail_refresh_after: int | None = None
    flushes: int = 0
    refreshes: int = 0
    labels: list[str] = field(default_factory=list)

    def can_flush(self) -> bool:
        return self.idle

    def flush(self, keep_running: bool) -> None:
        if self.fail_flush:
            raise StateConflict("not flushed")
        self.flushes += 1

    def refresh_derived(self) -> None:
        self.refreshes += 1
        if self.fail_refresh_after is not None and self.refreshes > self.fail_refresh_after:
            raise RuntimeError("not refreshed")

    def set_version(self, label: str) -> None:
        self.labels.append(label)

    def go_on(self) -> None:
        raise AssertionError("nothing was paused")


class Owned:
    """A server whose owner is always the one that asks."""

    owner = ("d", 1)
    owned = False

    def owned_by(self, owner: str, fence: int) -> bool:
        return (owner, fence) == self.owner

    def close(self) -> None:
        pass


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = state_of(0)
        self.model, placed = build(self.state)
        self.host = FakeHost()
        self.weights = EngineWeights(self.model, placed)
        self.rank = SglangRank(
            self.weights,
            Converter([], Found(placed, {}), dict, lambda named, parameters: None),
            self.host,
            lambda core, serves: cast(ReceiverServer, Owned()),
            name="x",
            rank=0,
            ranks=1,
            group=None,
        )
        self.core.follow("r")

    @property
    def core(self) -> ReceiverCore:
        return self.rank.core

    def target(self, version: int, new: State, base: State | None) -> p.TargetBody:
        return body_of(local_target(self.folder, METAS, new, base, version=version, dense=() if base else new))

    def prepare(self, version: int, new: State, base: State) -> None:
        self.core.prepare(p.Prepare(target=self.target(version, new, base)))

    def call(self, op: str, version: int, **more: Any) -> EngineAnswer:
        values = {"op": op, "run": "r", "version": version, "owner": "d", "fence": 1}
        return self.rank.update(EngineCall.model_validate(values | more))

    def holds(self, state: State) -> bool:
        ab, n = lanes_of(self.model)
        return (
            np.array_equal(ab[:48], state["a"])
            and np.array_equal(ab[48:80], state["b"])
            and np.array_equal(n, state["n"])
            and not ab[80:].any()
        )


def body_of(target: Target) -> p.TargetBody:
    return p.TargetBody(
        run=target.run,
        version=target.version,
        step=target.step,
        base=target.base,
        tensors=list(target.tensors),
        base_digests=target.base_digests,
        chunks=[
            p.ChunkBody(
                path=str(c.path), sha256=c.sha256, size_bytes=c.size_bytes, raw_bytes=c.raw_bytes, entries=c.entries
            )
            for c in target.chunks
        ],
    )


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_commit_is_installed_and_named_in_one_call(rig: Rig) -> None:
    new = changed(rig.state, np.random.default_rng(1))
    rig.prepare(1, new, rig.state)
    answer = rig.call("commit", 1)
    assert answer == EngineAnswer(phases=["clean"])
    assert rig.holds(new)
    assert (rig.core.version, rig.host.labels, rig.host.flushes, rig.host.refreshes) == (1, ["1"], 1, 1)
    # Again, as when the daemon missed the answer.
    assert rig.call("commit", 1).error is None
    assert rig.holds(new)


def test_nothing_is_written_where_the_cache_could_not_be_flushed(rig: Rig) -> None:
    rig.prepare(1, changed(rig.state, np.random.default_rng(1)), rig.state)
    rig.host.idle = False
    answer = rig.call("commit", 1)
    assert answer.error is not None
    assert answer.error.code == "state-conflict"
    assert rig.holds(rig.state)
    assert (answer.phases, rig.host.labels) == (["clean"], [])
    rig.prepare(1, new := changed(rig.state, np.random.default_rng(1)), rig.state)
    assert rig.call("commit", 1, keep_cache=True).error is None
    assert rig.holds(new)


def test_a_flush_that_fails_takes_the_weights_back(rig: Rig) -> None:
    rig.prepare(1, changed(rig.state, np.random.default_rng(1)), rig.state)
    rig.host.fail_flush = True
    answer = rig.call("commit", 1)
    assert answer.error is not None
    assert rig.holds(rig.state)
    assert (answer.phases, rig.core.version, rig.host.labels) == (["clean"], None, [])
    assert rig.host.refreshes == 2


def test_what_cannot_be_taken_back_is_said(rig: Rig) -> None:
    rig.prepare(1, changed(rig.state, np.random.default_rng(1)), rig.state)
    rig.host.fail_refresh_after = 0
    answer = rig.call("commit", 1)
    assert answer.error is not None
    assert answer.error.code == "half-written"


@pytest.mark.parametrize("more", [{"owner": "other"}, {"fence": 2}, {"run": "other"}])
def test_only_the_owner_of_this_run_may_write(rig: Rig, more: dict[str, Any]) -> None:
    rig.prepare(1, changed(rig.state, np.random.default_rng(1)), rig.state)
    answer = rig.call("commit", 1, **more)
    assert answer.error is not None
    assert rig.holds(rig.state)


def test_a_write_by_others_between_prepare_and_commit_is_seen(rig: Rig) -> None:
    rig.prepare(1, changed(rig.state, np.random.default_rng(1)), rig.state)
    rig.rank.touch()
    answer = rig.call("commit", 1)
    assert answer.error is not None
    assert answer.error.code == "live-changed"
    assert rig.holds(rig.state)


def test_a_resync_is_staged_written_and_declared_good(rig: Rig) -> None:
    base, new = state_of(5), changed(state_of(5), np.random.default_rng(2))
    targets = [rig.target(3, base, None), rig.target(4, new, base)]
    assert rig.call("resync", 4).error is not None
    rig.rank._stage(Stage(targets=targets))
    assert rig.call("resync", 4) == EngineAnswer(phases=["rewritten"])
    assert rig.holds(new)
    assert rig.core.version is None
    assert rig.call("finalize", 4) == EngineAnswer(phases=["clean"])
    assert (rig.core.version, rig.host.labels) == (4, ["4"])


def test_weights_that_are_away_are_not_read(rig: Rig) -> None:
    rig.rank.memory(away=True)
    with pytest.raises(StateConflict):
        rig.core.audit(p.Audit(tensors=METAS))
    rig.rank.memory(away=False)
    assert rig.core.audit(p.Audit(tensors=METAS)).digests.keys() == {"a", "b", "n"}


def test_a_replaced_parameter_is_bound_anew_and_one_of_another_shape_refused(rig: Rig) -> None:
    before, found = rig.core.status().generation, rig.core.audit(p.Audit(tensors=METAS)).digests
    rig.model.n = nn.Parameter(rig.model.get_parameter("n").detach().clone() + 1, requires_grad=False)
    again = rig.core.audit(p.Audit(tensors=METAS)).digests
    assert {n for n in found if found[n] != again[n]} == {"n"}
    assert rig.core.status().generation == before + 1
    rig.model.n = nn.Parameter(torch.zeros(9), requires_grad=False)
    with pytest.raises(InvalidInput, match="loaded otherwise"):
        rig.core.audit(p.Audit(tensors=METAS))


def test_weights_on_a_device_are_installed_there(rig: Rig) -> None:
    """The parameters move to a device that the host cannot read: they are bound anew, proven and written there."""
    memory = lanes_of(rig.model)
    with pretending() as module:
        for name in ("ab", "n"):
            moved = PretendTensor(rig.model.get_parameter(name).detach())
            setattr(rig.model, name, nn.Parameter(moved, requires_grad=False))
        new = changed(rig.state, np.random.default_rng(1))
        rig.prepare(1, new, rig.state)
        assert rig.call("commit", 1) == EngineAnswer(phases=["clean"])
        assert (rig.core.version, rig.core.ready) == (1, True)
        assert "synchronize" in module.calls
    ab, n = memory
    assert np.array_equal(ab, np.concatenate([new["a"], new["b"], np.zeros(PADDING * 8, np.uint16)]))
    assert np.array_equal(n, new["n"])


def test_weights_without_memory_are_refused(rig: Rig) -> None:
    rig.model.n = nn.Parameter(torch.zeros(8, device="meta"), requires_grad=False)
    with pytest.raises(InvalidInput, match=r"'n'.*meta"):
        rig.core.audit(p.Audit(tensors=METAS))


def test_writing_operations_are_not_on_the_socket(rig: Rig) -> None:
    serves = rig.rank._operations()
    assert not serves.keys() & {"commit", "finalize", "rollback", "resync"}
    assert serves.keys() >= {"describe", "status", "audit", "adopt", "prepare", "abort", "stage", "hold"}


def test_a_pause_ends_when_its_owner_is_lost() -> None:
    went_on = threading.Event()
    watch = PauseWatch(went_on.set, lambda: True, grace_s=0.01)
    watch.owner(False)  # nothing is paused: nothing happens
    watch.hold(True, 3600)
    watch.owner(False)
    assert went_on.wait(30)
    watch.close()


def test_a_pause_ends_when_its_owner_is_silent() -> None:
    went_on = threading.Event()
    watch = PauseWatch(went_on.set, lambda: True, grace_s=3600)
    watch.hold(True, 0.01)
    assert went_on.wait(30)
    watch.close()


def test_an_engine_between_two_versions_stays_paused() -> None:
    asked = threading.Event()

    def may() -> bool:
        asked.set()
        return False

    went_on = threading.Event()
    watch = PauseWatch(went_on.set, may, grace_s=0.01)
    watch.hold(True, 3600)
    watch.owner(False)
    assert asked.wait(30)
    watch.close()
    assert not went_on.is_set()


def test_a_pause_ends_once_the_weights_are_one_version_again() -> None:
    """Whoever paused the engine died in a commit that takes longer than the grace time, and is then undone."""
    torn = iter([True, True, False])
    went_on = threading.Event()
    watch = PauseWatch(went_on.set, lambda: not next(torn), grace_s=0.01)
    watch.hold(True, 3600)
    watch.owner(False)
    assert went_on.wait(30)
    watch.close()


def test_a_continue_that_fails_is_tried_again() -> None:
    tries: list[int] = []
    went_on = threading.Event()

    def go_on() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        went_on.set()

    watch = PauseWatch(go_on, lambda: True, grace_s=0.01)
    watch.hold(True, 0.01)
    assert went_on.wait(30)
    watch.close()


def test_a_pause_ends_when_another_owner_takes_over() -> None:
    went_on = threading.Event()
    watch = PauseWatch(went_on.set, lambda: True, grace_s=0.01)
    watch.hold(True, 3600)
    watch.owner(True)
    assert went_on.wait(30)
    watch.close()


def test_the_engine_stays_paused_while_another_rank_is_torn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    dirty = True

    def share_with_another(report: dict[str, Any], ranks: int, group: Any) -> list[dict[str, Any]]:
        return [report, {**report, "dirty": dirty} if "dirty" in report else report]

    monkeypatch.setattr("clients.rollout.sglang.rank.share", share_with_another)
    assert rig.rank._may_continue()
    assert rig.call("commit", 9).error is not None
    assert not rig.rank._may_continue()
    dirty = False
    assert rig.call("rollback", 0).error is None
    assert rig.rank._may_continue()


def test_a_call_while_the_memory_is_away_is_refused_and_not_raised(rig: Rig) -> None:
    new = changed(rig.state, np.random.default_rng(1))
    rig.prepare(1, new, rig.state)
    rig.rank.memory(away=True)
    answer = rig.call("commit", 1)
    assert answer.error is not None
    status = rig.core.status()
    assert (status.version, status.ready) == (None, False)
    generation = status.generation
    assert rig.core.status().generation == generation, "one change is counted once, however often one looks"
    rig.rank.memory(away=False)
    assert rig.holds(rig.state)
    assert not rig.core.status().ready


def test_reports_fit_whatever_an_error_says() -> None:
    long = p.ErrorBody(code="x", message="路径" * 2000, remedy='"\\' * 500, detail={"tensors": ["\x00\n" * 200] * 90})
    assert len(json.dumps({"error": _short(long)}).encode()) < REPORT_BYTES
    assert len(json.dumps({"path": "路" * 107, "error": plain("路径\n" * 900, 1000)}).encode()) < REPORT_BYTES


@pytest.mark.parametrize(("action", "writes"), [("reset_tensors", True), ("checksum", False)])
def test_the_engines_weight_checker_may_write(rig: Rig, action: str, writes: bool) -> None:
    plugin = Plugin()
    plugin._rank = rig.rank
    before = rig.core.status().generation
    assert plugin.checker(lambda updater, request: "done", None, SimpleNamespace(action=action)) == "done"
    assert (rig.core.status().generation > before) is writes


def test_calls_and_answers_survive_the_way_through_the_engine() -> None:
    assert parse_call(None) is None
    assert parse_call({"other": 1}) is None
    with pytest.raises(CodecError):
        parse_call({"dte": {"op": "erase"}})
    answer = EngineAnswer(phases=["clean"], error=p.ErrorBody(code="wrong-base", message="m"))
    assert parse_answer(answer_text(answer) + " Weight version updated to 3.") == answer
    with pytest.raises(CodecError):
        parse_answer("Succeeded to update model weights.")
    assert Hold(held=True).patience_s > 0
