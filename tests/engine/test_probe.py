"""Probing: what a loader does to positions comes out exactly, and what is no selection is never taken for one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidInput, LayoutError
from engine.layout.blocks import Block
from engine.layout.mapping import map_partial
from engine.layout.placement import Placement, numel_of
from engine.probe import Probed, fit_layouts, kept, memory_of, probe
from engine.probe.sources import Suspects
from engine.probe.tags import Numbering, pattern_words, read_digits, read_words
from engine.records.models import TensorMeta
from tests.support.views import PretendTensor, pretending

Named = Mapping[str, torch.Tensor]


def meta(name: str, *shape: int, dtype: str = "bfloat16") -> TensorMeta:
    return TensorMeta(name=name, shape=shape, dtype=dtype)  # type: ignore[arg-type]


class Engine:
    """An engine whose loading is a function from canonical tensors to parameters."""

    def __init__(self, tensors: list[TensorMeta], convert: Callable[[Named], Named]) -> None:
        self.tensors = tensors
        self.convert = convert
        zeros = {t.name: torch.zeros(tuple(t.shape), dtype=getattr(torch, t.dtype)) for t in tensors}
        self.parameters = {n: p.clone() for n, p in convert(zeros).items()}
        self.loads = 0

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, value in self.convert(dict(named)).items():
            self.parameters[name].copy_(value)

    def probe(self, **options: int) -> Probed:
        return probe(self.tensors, self.load, lambda: self.parameters, **options)


def sources(engine: Engine) -> dict[str, dict[int, tuple[str, int]]]:
    """Brute force: parameter → local element → (tensor, canonical element), from int64 positions (0: not written)."""
    named, start, owner = {}, 1, []
    for t in engine.tensors:
        n = numel_of(t)
        named[t.name] = torch.arange(start, start + n).reshape(tuple(t.shape))
        owner += [(t.name, i) for i in range(n)]
        start += n
    out = {}
    for name, value in engine.convert(named).items():
        flat = memory_of(name, value).tolist()
        out[name] = {i: owner[v - 1] for i, v in enumerate(flat) if v}
    return out


def pairs(placements: list[Placement]) -> dict[int, tuple[str, int]]:
    out: dict[int, tuple[str, int]] = {}
    for p in placements:
        at = map_partial(p.layout, np.arange(p.layout.src_numel))
        found = {i: (p.tensor.name, c) for i, c in enumerate(at.tolist()) if c >= 0}
        assert not found.keys() & out.keys(), "a local element has two placements"
        assert len(set(found.values())) == len(found), "a placement repeats a canonical element"
        out |= found
    return out


# --- the fit -----------------------------------------------------------------------------------------------------


def fitted(index: np.ndarray, dst: int) -> list[list[Block]]:
    flat = np.ascontiguousarray(index).reshape(-1).astype(np.int64)
    local = np.flatnonzero(flat >= 0)
    return [list(layout.blocks) for layout in fit_layouts(local, flat[local], flat.size, dst)]


GRID = np.arange(8 * 12).reshape(8, 12)


@pytest.mark.parametrize(
    ("index", "blocks"),
    [
        (GRID, [1]),
        (GRID.T, [1]),
        (GRID[:, 3:7], [1]),
        (GRID[2:5], [1]),
        (np.pad(GRID, ((0, 4), (2, 0)), constant_values=-1), [1]),
        (np.arange(120).reshape(2, 3, 4, 5).transpose(2, 0, 3, 1), [1]),
        (np.concatenate([GRID[4:], GRID[:4]]), [2]),
        (np.repeat(GRID, 2, axis=0), [1, 1]),
        (np.stack([GRID[::2], GRID[1::2]]), [1]),
        (GRID.reshape(-1)[5:70], [1]),
        (GRID.T.reshape(-1)[5:40], [2]),
    ],
)
def test_regular_layouts_need_few_blocks(index: np.ndarray, blocks: list[int]) -> None:
    assert [len(b) for b in fitted(index, GRID.size * 2)] == blocks


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_of_long_runs_are_fitted_exactly(data: st.DataObject) -> None:
    """Long runs take a shorter way through the fit; cut, shifted and repeated they must come out the same."""
    parts = []
    for _ in range(data.draw(st.integers(1, 6))):
        n = data.draw(st.integers(1, 80))
        first = data.draw(st.integers(0, 300))
        parts.append(np.full(n, -1) if data.draw(st.booleans()) and parts else np.arange(first, first + n))
    flat = np.concatenate(parts).astype(np.int64)
    local = np.flatnonzero(flat >= 0)
    back = np.full(flat.size, -1, np.int64)
    for layout in fit_layouts(local, flat[local], flat.size, 400):
        at = map_partial(layout, np.arange(flat.size))
        assert not ((at >= 0) & (back >= 0)).any()
        back = np.where(at >= 0, at, back)
    assert np.array_equal(back, flat)


def test_a_random_permutation_is_no_layout() -> None:
    index = np.random.default_rng(0).permutation(4000)
    with pytest.raises(LayoutError, match="rectangles"):
        fit_layouts(np.arange(4000), index, 4000, 4000)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_mapping_is_fitted_exactly(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60))
    index = data.draw(st.lists(st.integers(-1, 40), min_size=n, max_size=n))
    flat = np.array(index, np.int64)
    local = np.flatnonzero(flat >= 0)
    back = np.full(n, -1, np.int64)
    for layout in fit_layouts(local, flat[local], n, 41):
        at = map_partial(layout, np.arange(n))
        assert not ((at >= 0) & (back >= 0)).any()
        back = np.where(at >= 0, at, back)
    assert np.array_equal(back, flat)


# --- tags --------------------------------------------------------------------------------------------------------

DTYPES = ("bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_digits_survive_every_dtype(dtype: str) -> None:
    numbering = Numbering([meta("a", 7), meta("b", 300, 300, dtype=dtype)])
    assert numbering.digits == 3
    number = sum(
        (read_digits(numbering.tag(1, d).reshape(-1)).astype(np.int64) - 1) * 255**d for d in range(numbering.digits)
    )
    assert np.array_equal(number, np.arange(7, 7 + 90_000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_patterns_are_finite_bits_that_name_their_element(dtype: str) -> None:
    numbering = Numbering([meta("a", 7), meta("b", 50_000, dtype=dtype)])
    pattern = numbering.pattern(1, 1)
    if pattern.is_floating_point():
        assert bool(torch.isfinite(pattern).all())
        assert bool((pattern < 0).any())
    assert np.array_equal(read_words(pattern), pattern_words(np.arange(7, 50_007), dtype, 1))
    assert (read_words(pattern) != read_words(numbering.pattern(1, 2))).mean() > 0.9


def test_what_is_no_digit_reads_as_none() -> None:
    values = torch.tensor([0.0, 1.5, -1.0, 256.0, float("nan"), float("inf"), 255.0])
    assert read_digits(values).tolist() == [0, 0, 0, 0, 0, 0, 255]


# --- probing -----------------------------------------------------------------------------------------------------


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Loaders put together from what real ones do."""
    tensors, steps = [], []
    for i in range(draw(st.integers(1, 4))):
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        tensors.append(meta(f"t{i}", rows, columns, dtype=draw(st.sampled_from(["bfloat16", "bfloat16", "float32"]))))
        ops = draw(
            st.lists(
                st.sampled_from(["rows", "columns", "transpose", "interleave", "pad", "replicate", "permute"]),
                max_size=3,
            )
        )
        steps.append([(op, draw(st.integers(0, 10_000))) for op in ops])
    join = draw(st.booleans())

    def one(x: torch.Tensor, ops: list[tuple[str, int]]) -> torch.Tensor:
        for op, seed in ops:
            r, c = x.shape
            if op == "rows":
                x = x[seed % r :]
            elif op == "columns":
                x = x[:, : 1 + seed % c]
            elif op == "transpose":
                x = x.T
            elif op == "interleave" and r % 2 == 0:
                x = x.reshape(2, r // 2, c).transpose(0, 1).reshape(r, c)
            elif op == "pad":
                x = torch.nn.functional.pad(x, (0, seed % 3, 0, seed % 2))
            elif op == "replicate":
                x = x.repeat_interleave(2, 0)
            elif op == "permute":
                x = x[torch.from_numpy(np.random.default_rng(seed).permutation(r))]
        return x.contiguous()

    def convert(named: Named) -> Named:
        parts = {t.name: one(named[t.name], ops) for t, ops in zip(tensors, steps, strict=True)}
        out: dict[str, torch.Tensor] = {}
        if not join:
            return {f"p.{n}": x for n, x in parts.items()}
        for t in tensors:
            key = f"joined.{t.dtype}"
            flat = parts[t.name].reshape(-1)
            out[key] = torch.cat([out[key], flat]) if key in out else flat
        return out

    return Engine(tensors, convert)


@settings(max_examples=120, deadline=None)
@given(engines())
def test_the_placements_are_exactly_what_the_loader_does(engine: Engine) -> None:
    found = engine.probe()
    assert found.not_identity == {}
    expected = sources(engine)
    assert {n: pairs(p) for n, p in found.placements.items()} == expected
    used = {owner for local in expected.values() for owner, _ in local.values()}
    assert found.absent == {t.name for t in engine.tensors} - used
    empty = {n: p.numel() - len(expected[n]) for n, p in engine.parameters.items() if p.numel() > len(expected[n])}
    assert found.unwritten == empty


@settings(max_examples=40, deadline=None)
@given(engines(), st.integers(1, 300))
def test_a_memory_bound_changes_the_passes_and_nothing_else(engine: Engine, max_bytes: int) -> None:
    assert engine.probe(max_bytes=max_bytes) == engine.probe()


TRANSFORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative exponential": lambda x: -torch.exp(x.float()).to(x.dtype),
    "plus one": lambda x: x + 1,
    "absolute value": torch.abs,
    "doubled": lambda x: x * 2,
    "sorted": lambda x: x.reshape(-1).sort().values.reshape(x.shape),
    "in another dtype": lambda x: x.float(),
    "rounded": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
    "clamped": lambda x: x.clamp(-1e4, 1e4),
    "a scale over rows": lambda x: x / x.float().abs().amax(1, keepdim=True).to(x.dtype),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_a_transformed_tensor_is_not_identity_bits_and_is_the_only_one(
    transform: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    names = ["first", "second", "third", "fourth", "fifth"]

    def convert(named: Named) -> Named:
        if named["third"].dtype == torch.int64:  # positions: see `sources`
            return dict(named)
        return {
            "stacked": torch.cat([named["first"], named["second"]]),
            "odd": transform(named["third"]),
            "rest": torch.cat([named["fourth"], named["fifth"]], 1),
        }

    found = Engine([meta(n, 40, 40) for n in names], convert).probe()
    assert set(found.not_identity) == {"third"}
    assert "odd" in found.not_identity["third"]
    assert found.absent == frozenset()
    assert {p.tensor.name for p in found.placements["stacked"] + found.placements["rest"]} == set(names) - {"third"}


def test_a_mixture_names_all_its_tensors() -> None:
    tensors = [meta(f"t{i}", 16) for i in range(6)]
    engine = Engine(tensors, lambda n: {"sum": n["t1"] + n["t4"], **{f"p{i}": n[f"t{i}"] for i in (0, 2, 3, 5)}})
    assert {"t1", "t4"} <= set(engine.probe().not_identity)


def test_constants_and_padding_blame_nobody() -> None:
    engine = Engine([meta("a", 4, 4)], lambda n: {"a": torch.cat([n["a"], torch.ones(2, 4, dtype=n["a"].dtype)])})
    found = engine.probe()
    assert found.not_identity == {}
    assert found.unwritten == {"a": 8}


def test_an_irregular_tensor_is_reported_with_where_it_lies() -> None:
    order = torch.from_numpy(np.random.default_rng(1).permutation(3000))
    found = Engine([meta("a", 3000), meta("b", 8)], lambda n: {"p": n["a"][order], "q": n["b"]}).probe()
    assert set(found.not_identity) == {"a"}
    assert "'p'" in found.not_identity["a"]


def test_bool_tensors_cannot_be_probed_and_are_said() -> None:
    engine = Engine([meta("a", 8)], lambda n: {"p": n["a"]})
    found = probe([*engine.tensors, meta("mask", 4, dtype="bool")], engine.load, lambda: engine.parameters)
    assert set(found.not_identity) == {"mask"}


def test_tied_parameters_are_one_with_an_alias() -> None:
    engine = Engine([meta("embed", 6, 4)], lambda n: {"embed": n["embed"]})
    engine.parameters["head"] = engine.parameters["embed"]
    found = engine.probe()
    assert found.aliases == {"head": "embed"}
    assert list(found.placements) == ["embed"]


def test_a_parameter_stored_transposed_is_described_in_memory_order() -> None:
    engine = Engine([meta("a", 6, 4)], lambda n: {"p": n["a"]})
    engine.parameters["p"] = torch.zeros(4, 6, dtype=torch.bfloat16).T
    assert pairs(engine.probe().placements["p"])[1] == ("a", 4)


def test_memory_with_gaps_is_refused() -> None:
    with pytest.raises(InvalidInput, match="gapless"):
        memory_of("p", torch.zeros(4, 6)[:, :3])


def test_values_can_be_kept() -> None:
    engine = Engine([meta("a", 6, 4)], lambda n: {"p": n["a"]})
    before = engine.parameters["p"].normal_().clone()
    with kept(lambda: engine.parameters):
        engine.probe()
        assert not torch.equal(engine.parameters["p"], before)
    assert torch.equal(engine.parameters["p"], before)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_suspects_are_told_apart(count: int) -> None:
    suspects = Suspects(count)
    trials = list(suspects.trials())
    for k in range(count):
        assert suspects.guilty([np.array([k in t, False]) for t in trials]) == [k]
    assert suspects.guilty([np.array([False]) for _ in trials]) == []


def test_placements_go_through_json() -> None:
    engine = Engine([meta("a", 6, 4), meta("b", 2)], lambda n: {"p": n["a"].T.contiguous(), "q": n["b"]})
    for placement in engine.probe().placements["p"]:
        assert Placement.from_json(placement.to_json()) == placement


# --- parameters on a device ---------------------------------------------------------------------------------------


def test_parameters_on_a_device_are_probed_and_kept_on_the_host() -> None:
    tensors = [meta("q", 6, 4), meta("k", 2, 4), meta("n", 5, dtype="float32")]
    engine = Engine(tensors, lambda t: {"qk": torch.cat([t["q"], t["k"]]), "n": t["n"]})
    expected = engine.probe()
    host = {n: torch.full_like(p, 3) for n, p in engine.parameters.items()}
    with pretending():
        engine.parameters = {n: PretendTensor(p) for n, p in host.items()}
        with kept(lambda: engine.parameters):
            found = engine.probe()
            assert not all(bool((p == 3).all()) for p in host.values())
    assert found == expected
    assert all(bool((p == 3).all()) for p in host.values())


def test_what_is_kept_takes_no_room_on_the_device() -> None:
    with pretending():
        parameter = PretendTensor(torch.ones(4))

        def there() -> int:
            gc.collect()
            return sum(type(o) is PretendTensor for o in gc.get_objects())

        before = there()
        with kept(lambda: {"w": parameter}):
            assert there() == before
