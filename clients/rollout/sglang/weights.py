"""One scheduler rank's parameters as the receiver core wants them.

One invariant: pointers are looked up anew each time, so a parameter that the engine replaced is seen as replaced; what
the engine's own update calls write is counted in `touched`, since nothing in the memory itself tells.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from engine.apply import LiveCopy, LiveSet, LiveTensor, view_of
from engine.errors import InvalidInput, StateConflict
from engine.layout.algebra import scaled
from engine.layout.blocks import Block, Layout
from engine.layout.placement import Placement
from engine.records.models import ITEMSIZE


def dtype_name(dtype: torch.dtype) -> str:
    """Without the `torch.`."""
    return str(dtype).removeprefix("torch.")


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, tied ones once."""
    return dict(model.named_parameters())


def _window(layout: Layout) -> tuple[int, Layout]:
    """(first, the layout of the smallest run of local elements that holds all it maps, from there on)."""
    first = min(b.src_offset for b in layout.blocks)
    count = max(b.src_last for b in layout.blocks) + 1 - first
    blocks = tuple(
        Block(b.shape, b.src_offset - first, b.src_strides, b.dst_offset, b.dst_strides) for b in layout.blocks
    )
    return first, Layout(blocks, count, layout.dst_numel)


class EngineWeights:
    """`placements`: what each parameter holds. `aliases`: further names a version may use for a canonical tensor.
    `converted`: parameters that hold no canonical tensor's bits; `elsewhere`: the names of the tensors they come from.
    """

    def __init__(
        self,
        model: nn.Module,
        placements: Mapping[str, Sequence[Placement]],
        *,
        aliases: Mapping[str, Sequence[str]] | None = None,
        partial: bool = False,
        converted: Collection[str] = (),
        elsewhere: Collection[str] = (),
    ) -> None:
        self._model = model
        self._placements = {name: tuple(found) for name, found in placements.items()}
        self._aliases = {name: tuple(more) for name, more in (aliases or {}).items()}
        self._partial = partial
        self._converted = frozenset(converted)
        self._elsewhere = frozenset(elsewhere)
        self._touched = 0
        self.away = False

    def touch(self) -> None:
        """Something other than the receiver protocol writes, or may have written, to the weights."""
        self._touched += 1

    def places(self) -> tuple[object, ...]:
        if self.away:
            return ("away",)
        found = parameters_of(self._model)
        return tuple((n, t.device, t.data_ptr(), t.dtype, *t.shape, *t.stride()) for n, t in found.items())

    def writes(self) -> tuple[object, ...]:
        return (self._touched,)

    def live(self) -> LiveSet:
        """StateConflict while the memory is released; InvalidInput if a parameter is not what it was."""
        if self.away:
            raise StateConflict("the engine has released the memory of its weights.", remedy="Resume it first.")
        found = parameters_of(self._model)
        if found.keys() != self._placements.keys():
            other = sorted(found.keys() ^ self._placements.keys())[0]
            side = "the model" if other in found else "the layout"
            raise InvalidInput(f"only {side} has a parameter {other!r}.")
        copies: dict[str, list[tuple[Placement, LiveCopy]]] = {}
        for name, placed in self._placements.items():
            if name in self._converted:
                continue
            flat = self._flat(name, found[name])
            for placement in placed:
                first, layout = _window(placement.layout)
                size = ITEMSIZE[placement.tensor.dtype]
                view = view_of(name, flat.narrow(0, first, layout.src_numel))
                copy = LiveCopy(view, scaled(layout, size // 2))
                copies.setdefault(placement.tensor.name, []).append((placement, copy))
        tensors = [
            LiveTensor(
                (name, *self._aliases.get(name, ())),
                tuple(placed[0][0].tensor.shape),
                placed[0][0].tensor.dtype,
                tuple(copy for _, copy in placed),
            )
            for name, placed in copies.items()
        ]
        return LiveSet(tensors, partial=self._partial, elsewhere=self._elsewhere)

    def _flat(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in memory order, where they lie, not a copy."""
        dtype = dtype_name(tensor.dtype)
        if not tensor.is_contiguous() or ITEMSIZE.get(dtype, 1) < 2:
            raise InvalidInput(f"{name!r} ({dtype}, strides {tensor.stride()}) is not a plain 16- or 32-bit tensor.")
        for placement in self._placements[name]:
            if placement.tensor.dtype != dtype or placement.layout.src_numel != tensor.numel():
                raise InvalidInput(f"{name!r} is now {dtype} with {tensor.numel()} elements; it was loaded otherwise.")
        return tensor.detach().view(-1)
