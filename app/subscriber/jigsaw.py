"""How the pieces of tensors on several ranks add up to whole tensors.

One invariant: every canonical lane is counted exactly once; ranks that hold the same piece are replicas and must agree.
Tensors that ranks keep otherwise than by their bits add up to nothing: of them it says what is converted together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from clients.rollout.protocol import Description, LocalTensor, NamedTensor
from engine.digest import add, from_hex, to_hex
from engine.errors import InvalidInput, ProofError
from engine.layout.algebra import from_json, identity
from engine.layout.blocks import Layout
from engine.layout.cover import prove_exact_cover
from engine.records.models import ITEMSIZE, TensorMeta

Piece = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
"""The canonical lanes of a layout, whatever their order in memory: per block its offset and (stride, size) pairs."""


def _lanes(meta: TensorMeta) -> int:
    n = ITEMSIZE[meta.dtype]
    for size in meta.shape:
        n *= size
    return -(-n // 2)


def _layout(local: LocalTensor, lanes: int) -> Layout:
    return identity(lanes) if local.blocks is None else from_json(local.blocks, local.held, lanes)


def _piece(layout: Layout) -> Piece:
    blocks = []
    for block in layout.blocks:
        n = block.swapped().normalised()
        blocks.append((n.src_offset, tuple(zip(n.src_strides, n.shape, strict=True))))
    return tuple(sorted(blocks))


def _require_fit(number: int, local: LocalTensor | NamedTensor, meta: TensorMeta) -> None:
    if (tuple(local.shape), local.dtype) != (tuple(meta.shape), meta.dtype):
        raise InvalidInput(
            f"rank {number} holds {meta.name!r} as {local.dtype} {list(local.shape)}, the version has "
            f"{meta.dtype} {list(meta.shape)}.",
            remedy="Load the receiver with the dtype and configuration that the trainer publishes.",
        )


class Jigsaw:
    """Built once per set of ranks and canonical tensors.

    InvalidInput if a rank's tensor does not fit its canonical one; LayoutError naming the gap or overlap if the ranks'
    pieces do not cover a tensor exactly.
    """

    def __init__(self, ranks: Sequence[Description], tensors: Sequence[TensorMeta]) -> None:
        self._groups: dict[str, list[list[int]]] = {}
        self._units: list[list[str]] = []
        by_name = [{name: local for local in rank.tensors for name in local.names} for rank in ranks]
        for meta in self._join_units(ranks, tensors):
            pieces: dict[Piece, list[int]] = {}
            layouts: dict[Piece, Layout] = {}
            for number, names in enumerate(by_name):
                local = names.get(meta.name)
                if local is None:
                    continue
                _require_fit(number, local, meta)
                layout = _layout(local, _lanes(meta))
                piece = _piece(layout)
                pieces.setdefault(piece, []).append(number)
                layouts[piece] = layout
            prove_exact_cover(
                _lanes(meta), [(f"{meta.name} on rank {pieces[p][0]}", layout) for p, layout in layouts.items()]
            )
            self._groups[meta.name] = list(pieces.values())

    @property
    def converted(self) -> frozenset[str]:
        """The version's tensors that are converted, so that no digest of the live weights proves them."""
        return frozenset(name for unit in self._units for name in unit)

    def units(self, changed: Collection[str]) -> list[list[str]]:
        """What must be converted, unit by unit, when these tensors have changed."""
        return [unit for unit in self._units if not set(unit).isdisjoint(changed)]

    def provable(self, digests: dict[str, str]) -> dict[str, str]:
        """Those of them that the ranks' digests can equal."""
        return {name: digest for name, digest in digests.items() if name in self._groups}

    def _join_units(self, ranks: Sequence[Description], tensors: Sequence[TensorMeta]) -> list[TensorMeta]:
        """Join the ranks' units that share a tensor; the tensors that are in none."""
        known = {t.name: t for t in tensors}
        unit_of: dict[str, list[str]] = {}
        for number, rank in enumerate(ranks):
            for unit in rank.units:
                joined: list[str] = []
                for tensor in unit.tensors:
                    meta = next((known[n] for n in tensor.names if n in known), None)
                    if meta is None:
                        raise InvalidInput(f"rank {number} needs {tensor.names[0]!r}, which the version has not.")
                    _require_fit(number, tensor, meta)
                    joined += unit_of.get(meta.name, [meta.name])
                joined = list(dict.fromkeys(joined))
                unit_of |= dict.fromkeys(joined, joined)
        self._units = list({id(unit): unit for unit in unit_of.values()}.values())
        held = {name for rank in ranks for local in rank.tensors for name in local.names}
        both = sorted(held.intersection(unit_of))
        if both:
            raise InvalidInput(f"{both[0]!r} is kept by its bits on one rank and converted on another.")
        return [t for t in tensors if t.name not in unit_of]

    def combine(self, per_rank: Sequence[dict[str, str]]) -> dict[str, str]:
        """Digest of every whole tensor from the ranks' digests; ProofError if replicas differ or one is missing."""
        whole: dict[str, str] = {}
        for name, groups in self._groups.items():
            total = 0
            for group in groups:
                found = {per_rank[number].get(name, "") for number in group}
                if len(found) > 1 or "" in found:
                    raise ProofError(
                        f"ranks {group} should hold the same piece of {name!r} and do not.",
                        remedy="Something else wrote to one of them; the receiver is resynced.",
                    )
                total = add(total, from_hex(found.pop()))
            whole[name] = to_hex(total)
        return whole
