"""Converter units on one rank, with a loader of the test's own: grouping, staging, conversion, undo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from clients.rollout import protocol as p
from clients.rollout.server import ReceiverServer
from clients.rollout.sglang import converter as converting
from clients.rollout.sglang.call import EngineAnswer, EngineCall, Stage, StageUnit, UnitTensor
from clients.rollout.sglang.converter import Converter
from clients.rollout.sglang.layouts import Found
from clients.rollout.sglang.rank import SglangRank
from clients.rollout.sglang.units import Unit, units_of
from clients.rollout.sglang.weights import EngineWeights, dtype_name
from engine.apply import TensorMismatch, WrongBase
from engine.apply.device import DeviceLanes
from engine.errors import CodecError, InvalidInput, ProofError, StateConflict
from engine.layout.algebra import identity
from engine.layout.blocks import Block, Layout
from engine.layout.placement import Placement
from engine.probe import probe
from engine.records import TensorMeta
from tests.clients.test_sglang_rank import FakeHost, Owned, body_of
from tests.support.versions import State, digest_of, local_target, metas_of

METAS = metas_of(
    {
        "q": ((6, 8), "bfloat16"),
        "k": ((2, 8), "bfloat16"),
        "o": ((8, 6), "bfloat16"),
        "a": ((8,), "bfloat16"),
        "n": ((8,), "bfloat16"),
    }
)
META = {m.name: m for m in METAS}


def at(meta: TensorMeta, first: int, whole: int) -> Placement:
    n = int(np.prod(meta.shape))
    return Placement(meta, Layout((Block((n,), first, (1,), 0, (1,)),), whole, n))


# --- grouping ---------------------------------------------------------------------------------------------------------

QK = {
    "qk": [at(META["q"], 0, 72), at(META["k"], 48, 72)],
    "o": [at(META["o"], 0, 48)],
    "n": [at(META["n"], 0, 8)],
}


def named(units: list[Unit]) -> list[tuple[set[str], set[str]]]:
    return [({t.name for t in u.tensors}, set(u.parameters)) for u in units]


def test_where_everything_is_kept_by_its_bits_there_are_no_units() -> None:
    assert units_of(Found(QK, {}), dict.fromkeys(QK, "bfloat16")) == []


def test_tensors_that_share_a_parameter_are_one_unit_and_the_rest_stays_as_it_is() -> None:
    dtypes = {"qk": "float16", "o": "float32", "n": "bfloat16"}
    assert named(units_of(Found(QK, {}), dtypes)) == [({"q", "k"}, {"qk"}), ({"o"}, {"o"})]


def test_parameters_that_share_a_tensor_or_a_step_are_one_unit() -> None:
    placed = {**QK, "copy": [at(META["o"], 0, 48)]}
    dtypes = {"qk": "bfloat16", "o": "float32", "n": "bfloat16", "copy": "bfloat16"}
    assert named(units_of(Found(placed, {}), dtypes, [["qk", "n"]])) == [({"o"}, {"o", "copy"})]
    assert named(units_of(Found(placed, {}), dtypes, [["n", "copy"]])) == [({"o", "n"}, {"o", "n", "copy"})]


def test_a_parameter_computed_from_one_tensor_is_served_and_one_mixed_of_two_is_not() -> None:
    dtypes = {"qk": "bfloat16", "x": "float32"}
    placed: dict[str, list[Placement]] = {"qk": QK["qk"], "x": []}
    assert named(units_of(Found(placed, {"x": [META["a"]]}), dtypes)) == [({"a"}, {"x"})]
    with pytest.raises(InvalidInput, match="told apart"):
        units_of(Found(placed, {"x": [META["a"], META["n"]]}), dtypes)


def test_the_probe_says_where_a_retyped_tensor_is_and_what_a_computed_one_comes_from() -> None:
    model = Model()
    found = probe(METAS, model.load, lambda: dict(model.named_parameters()))
    assert found.placements["n"] == [Placement(META["n"], identity(8))]
    assert {pl.tensor.name: pl.layout for pl in found.retyped["qk"]} == {
        pl.tensor.name: pl.layout for pl in (at(META["q"], 0, 72), at(META["k"], 48, 72))
    }
    assert found.mixed == {"a": ["a"]}
    assert found.not_identity.keys() == {"q", "k", "o", "a"}
    assert found.unwritten == {"qk": 8, "a": 8}, "padding, and what is computed"


# --- conversion -------------------------------------------------------------------------------------------------------


def bits(rng: np.random.Generator, meta: TensorMeta) -> Any:
    values = torch.from_numpy(rng.normal(size=tuple(meta.shape)).astype(np.float32)).to(torch.bfloat16)
    return values.view(torch.uint16).numpy().reshape(-1).copy()


def state_of(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {m.name: bits(rng, m) for m in METAS}


def tensor_of(meta: TensorMeta, lanes: Any) -> torch.Tensor:
    return torch.from_numpy(lanes.copy()).view(torch.bfloat16).reshape(tuple(meta.shape))


class Model(nn.Module):
    """`qk` in FP16 with a row of padding, `o` in FP32, `a` as −exp in FP32, `n` by its bits."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape, dtype in (
            ("qk", (9, 8), torch.float16),
            ("o", (8, 6), torch.float32),
            ("a", (8,), torch.float32),
            ("n", (8,), torch.bfloat16),
        ):
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        self.loads: list[list[str]] = []
        self.fault: str | None = None

    def load(self, named: Iterable[tuple[str, torch.Tensor]], parameters: Sequence[str] = ()) -> None:
        seen = []
        with torch.no_grad():
            for name, tensor in named:
                seen.append(name)
                if self.fault == f"before {name}":
                    raise RuntimeError("asked to fail")
                if name == "q":
                    self.qk[:6].copy_(tensor)
                elif name == "k":
                    self.qk[6:8].copy_(tensor)
                elif name == "a":
                    self.a.copy_(-torch.exp(tensor.float()))
                else:
                    self.get_parameter(name).copy_(tensor)
        if self.fault == "foreign" and "q" in seen:
            self.qk[8] += 1
        if self.fault == "replace" and "o" in seen:
            self.o.data = self.o.data.clone()
        self.loads.append(seen)

    def bytes(self) -> dict[str, bytes]:
        return {n: t.detach().view(torch.uint8).numpy().tobytes() for n, t in self.named_parameters()}


FOUND = Found({**QK, "a": []}, {"a": [META["a"]]})


def fresh(state: State) -> Model:
    """What the engine's loader makes of a checkpoint with these weights."""
    model = Model()
    model.load((m.name, tensor_of(m, state[m.name])) for m in METAS)
    model.loads.clear()
    return model


@dataclass
class Rig:
    folder: Path
    state: State
    model: Model
    host: FakeHost
    rank: SglangRank
    files: int = 0

    @classmethod
    def make(cls, folder: Path) -> Rig:
        state, host = state_of(0), FakeHost()
        model = fresh(state)
        dtypes = {n: dtype_name(t.dtype) for n, t in model.named_parameters()}
        units = units_of(FOUND, dtypes)
        converter = Converter(units, FOUND, lambda: dict(model.named_parameters()), model.load)
        weights = EngineWeights(
            model,
            FOUND.placements,
            converted={n for u in units for n in u.parameters},
            elsewhere=converter.names,
        )
        rank = SglangRank(
            weights,
            converter,
            host,
            lambda core, serves: cast(ReceiverServer, Owned()),
            name="x",
            rank=0,
            ranks=1,
            group=None,
        )
        rank.core.follow("r")
        return cls(folder, state, model, host, rank)

    @property
    def version(self) -> int | None:
        return self.rank.core.status().version

    def target(self, version: int, new: State, base: State | None) -> p.TargetBody:
        return body_of(local_target(self.folder, METAS, new, base, version=version, dense=() if base else new))

    def stage(self, version: int, state: State, names: Sequence[str], **damage: Any) -> None:
        """As the daemon does it: a file that is gone afterwards."""
        self.files += 1
        path = self.folder / f"unit-{self.files}"
        data, tensors = bytearray(), []
        for name in names:
            data += bytes(-len(data) % 64)
            said = {"digest": digest_of(name, state[name]), "offset": len(data)} | damage
            tensors.append(UnitTensor(name=name, shape=META[name].shape, dtype=META[name].dtype, **said))
            data += state[name].tobytes()
        path.write_bytes(data)
        try:
            self.rank.core.stage_unit(StageUnit(version=version, path=str(path), tensors=tensors))
        finally:
            path.unlink()

    def adopt(self, version: int, state: State) -> p.Status:
        digested = self.target(version, state, None).tensors
        audit = self.rank.core.audit(p.Audit(tensors=METAS))
        assert audit.digests.keys() == {"n"}, "only what is kept by its bits has a digest"
        return self.rank.core.adopt(p.Adopt(version=version, step=0, tensors=digested, digests=audit.digests))

    def adopted(self) -> None:
        """At version 0, everything converted."""
        assert self.adopt(0, self.state).version is None, "what was loaded is not recognised"
        for unit in (["q", "k"], ["o"], ["a"]):
            self.stage(0, self.state, unit)
        assert self.call("commit", 0).error is None
        self.model.loads.clear()

    def call(self, op: str, version: int) -> EngineAnswer:
        values = {"op": op, "run": "r", "version": version, "owner": "d", "fence": 1}
        return self.rank.update(EngineCall.model_validate(values))

    def prepare(self, version: int, new: State, base: State) -> None:
        self.rank.core.prepare(p.Prepare(target=self.target(version, new, base)))


@pytest.fixture(params=["host", "device"])
def rig(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Converted parameters in host memory, or in what is treated like an accelerator's."""
    if request.param == "device":
        monkeypatch.setattr(converting, "view_of", lambda name, flat: DeviceLanes(flat))
    return Rig.make(tmp_path)


def step(state: State, *names: str) -> State:
    """Another state in which only these tensors changed, in one element each."""
    new = {n: v.copy() for n, v in state.items()}
    for name in names:
        new[name][3] ^= 0x8040
    return new


def test_units_are_announced_and_the_rest_described_as_ever(rig: Rig) -> None:
    found = rig.rank.core.describe(p.Empty())
    assert [t.names for t in found.tensors] == [["n"]]
    assert [[t.names[0] for t in u.tensors] for u in found.units] == [["q", "k"], ["o"], ["a"]]
    assert [u.parameters for u in found.units] == [["qk"], ["o"], ["a"]]


def test_at_adoption_everything_is_converted_once(rig: Rig) -> None:
    before = rig.model.bytes()
    rig.adopted()
    assert rig.version == 0
    assert rig.model.bytes() == before, "it had been loaded from version 0"
    # The daemon comes back: nothing needs to be done.
    assert rig.adopt(0, rig.state).version == 0


def test_versions_arrive_as_a_fresh_load_has_them_and_only_what_changed_is_loaded(rig: Rig) -> None:
    rig.adopted()
    for version, names in enumerate((["q", "n"], ["k"], ["n"], ["a", "o"], ["q", "k", "o", "a", "n"]), 1):
        new = step(rig.state, *names)
        rig.prepare(version, new, rig.state)
        loads = [u for u in (["q", "k"], ["o"], ["a"]) if set(u) & set(names)]
        for unit in loads:
            rig.stage(version, new, unit)
        assert rig.call("commit", version).error is None
        assert rig.model.bytes() == fresh(new).bytes()
        assert rig.model.loads == loads
        assert rig.version == version
        rig.model.loads.clear()
        rig.state = new
    assert rig.call("commit", version).error is None, "again, as when the daemon missed the answer"
    assert rig.model.loads == []


@pytest.mark.parametrize("fault", ["before k", "before a", "foreign", "replace"])
def test_a_loader_that_fails_or_does_more_than_it_should_is_undone(rig: Rig, fault: str) -> None:
    rig.adopted()
    before, places = rig.model.bytes(), {n: t.data_ptr() for n, t in rig.model.named_parameters()}
    new = step(rig.state, *META)
    rig.prepare(1, new, rig.state)
    for unit in (["q", "k"], ["o"], ["a"]):
        rig.stage(1, new, unit)
    rig.model.fault = fault
    answer = rig.call("commit", 1)
    assert answer.error is not None
    assert answer.error.code == ("receiver-error" if "before" in fault else "wrong-conversion")
    assert answer.phases == ["clean"]
    assert rig.model.bytes() == before
    assert {n: t.data_ptr() for n, t in rig.model.named_parameters()} == places
    assert rig.version == 0
    rig.model.fault = None
    rig.prepare(1, new, rig.state)
    for unit in (["q", "k"], ["o"], ["a"]):
        rig.stage(1, new, unit)
    assert rig.call("commit", 1).error is None
    assert rig.model.bytes() == fresh(new).bytes()


def test_a_flush_that_fails_after_the_conversion_takes_everything_back(rig: Rig) -> None:
    rig.adopted()
    before, new = rig.model.bytes(), step(rig.state, "q", "a", "n")
    rig.prepare(1, new, rig.state)
    rig.stage(1, new, ["q", "k"])
    rig.stage(1, new, ["a"])
    rig.host.fail_flush = True
    assert rig.call("commit", 1).error is not None
    assert (rig.model.bytes(), rig.version) == (before, 0)


def test_a_changed_unit_that_was_not_staged_stops_the_commit_before_any_conversion(rig: Rig) -> None:
    rig.adopted()
    before, new = rig.model.bytes(), step(rig.state, "q", "o", "n")
    rig.prepare(1, new, rig.state)
    rig.stage(1, new, ["q", "k"])
    answer = rig.call("commit", 1)
    assert answer.error is not None
    assert "'o' of version 1 is not staged" in answer.error.message
    assert (rig.model.bytes(), rig.model.loads, rig.version) == (before, [], 0)


def test_a_loader_may_not_touch_a_tensor_that_did_not_change(rig: Rig) -> None:
    """k is loaded with q, since they share a parameter, but its elements must come out as they were."""
    rig.adopted()
    new = step(rig.state, "q")
    rig.prepare(1, new, rig.state)
    rig.stage(1, new, ["q", "k"])
    with torch.no_grad():
        rig.model.qk[6, 0] += 1  # by somebody whom no hook saw, between prepare and commit
    answer = rig.call("commit", 1)
    assert answer.error is not None
    assert answer.error.code == "wrong-conversion"


def test_what_others_wrote_to_a_converted_parameter_is_noticed(rig: Rig) -> None:
    rig.adopted()
    with torch.no_grad():
        rig.model.a[2] += 1
    with pytest.raises(WrongBase, match="'a'"):
        rig.prepare(1, step(rig.state, "q"), rig.state)
    assert rig.version is None
    assert rig.adopt(0, rig.state).version is None
    for unit in (["q", "k"], ["o"], ["a"]):
        rig.stage(0, rig.state, unit)
    assert rig.call("commit", 0).error is None
    assert rig.model.bytes() == fresh(rig.state).bytes()


def test_an_update_by_others_before_the_conversion_makes_it_stale(rig: Rig) -> None:
    assert rig.adopt(0, rig.state).version is None
    for unit in (["q", "k"], ["o"], ["a"]):
        rig.stage(0, rig.state, unit)
    rig.rank.touch()
    assert rig.call("commit", 0).error is not None
    assert (rig.model.loads, rig.version) == ([], None)


def test_units_of_another_version_are_no_base(rig: Rig) -> None:
    rig.adopted()
    later = step(rig.state, "q")
    with pytest.raises(WrongBase):
        rig.prepare(3, step(later, "o"), later)
    assert rig.version == 0


def test_only_proven_files_of_the_prepared_version_are_taken(rig: Rig) -> None:
    rig.adopted()
    new = step(rig.state, "q")
    with pytest.raises(StateConflict):
        rig.stage(1, new, ["q", "k"])
    rig.prepare(1, new, rig.state)
    with pytest.raises(StateConflict):
        rig.stage(2, new, ["q", "k"])
    with pytest.raises(ProofError, match="not version 1's"):
        rig.stage(1, rig.state, ["q", "k"])
    with pytest.raises(ProofError, match="in its file"):
        rig.stage(1, {**new, "q": rig.state["q"]}, ["q"], digest=digest_of("q", new["q"]))
    with pytest.raises(CodecError, match="does not lie"):
        rig.stage(1, new, ["q"], offset=64)
    tensors = [UnitTensor(name="q", shape=(6, 8), dtype="bfloat16", digest=digest_of("q", new["q"]), offset=0)]
    (rig.folder / "link").symlink_to("/etc/hostname")
    for path in (rig.folder, rig.folder / "link", rig.folder / "none"):
        with pytest.raises(CodecError):
            rig.rank.core.stage_unit(StageUnit(version=1, path=str(path), tensors=tensors))


def test_a_version_with_another_shape_or_dtype_is_refused(rig: Rig) -> None:
    rig.adopted()
    target = rig.target(1, step(rig.state, "q"), rig.state)
    odd = [t.model_copy(update={"dtype": "float16"}) if t.name == "o" else t for t in target.tensors]
    with pytest.raises(TensorMismatch, match="'o'"):
        rig.rank.core.prepare(p.Prepare(target=target.model_copy(update={"tensors": odd})))
    assert rig.version == 0


def test_a_resync_converts_everything_and_one_that_fails_stays_dirty(rig: Rig) -> None:
    new = state_of(5)
    for fault in ("before a", None):
        rig.rank._stage(Stage(targets=[rig.target(4, new, None)]))
        for unit in (["q", "k"], ["o"], ["a"]):
            rig.stage(4, new, unit)
        rig.model.fault = fault
        answer = rig.call("resync", 4)
        assert answer.phases == ["rewritten"]
        assert (answer.error is None) == (fault is None)
        assert rig.rank.core.dirty
        assert rig.version is None
    assert rig.call("finalize", 4).error is None
    assert (rig.version, rig.rank.core.dirty) == (4, False)
    assert rig.model.bytes() == fresh(new).bytes()


def test_the_undo_is_of_the_size_of_what_changed(rig: Rig) -> None:
    rig.adopted()
    new = step(rig.state, "q")
    rig.prepare(1, new, rig.state)
    rig.stage(1, new, ["q", "k"])
    converter = rig.rank.core.converter
    converter.convert(1)
    (old,) = converter._undo
    assert old.at is not None
    assert old.lanes.size == 1
    converter.rollback()
    assert not converter.dirty


def test_what_was_staged_is_dropped_when_its_owner_is_lost(rig: Rig) -> None:
    rig.adopted()
    new = step(rig.state, "q")
    rig.prepare(1, new, rig.state)
    rig.stage(1, new, ["q", "k"])
    rig.rank.core.owner_lost()
    with pytest.raises(StateConflict):
        rig.stage(1, new, ["q", "k"])
    assert rig.version == 0


def test_the_same_number_in_another_run_is_another_version(rig: Rig) -> None:
    rig.adopted()
    assert rig.adopt(0, rig.state).version == 0
    # The run begun anew: the bits of other weights would be taken for it by the number alone.
    assert rig.adopt(0, step(rig.state, "q")).version is None
    rig.rank.core.follow("another")
    assert rig.adopt(0, rig.state).version is None
