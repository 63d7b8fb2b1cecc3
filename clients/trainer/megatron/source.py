"""`MegatronSource`: a rank of a Megatron-Core job publishes the optimizer shard it owns, without gather or conversion.

One invariant: everything a rollout engine loads is declared by exactly one rank, whatever the parallel shape; what no
table knows is refused, not left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist

from clients.protocol import Detector
from clients.trainer.group import exchange
from clients.trainer.home import Home, PlainHome
from clients.trainer.megatron.model import BufferHome, Named, buffers, parameters, unwrap
from clients.trainer.megatron.state import check_masters, holders_of, inner_optimizers, masters
from clients.trainer.options import SourceOptions
from clients.trainer.owners import spread
from clients.trainer.plan import Planner
from clients.trainer.shards import OwnedRun, OwnedShard
from clients.trainer.source import Source
from engine.errors import InvalidInput
from engine.layout.placement import Placement
from engine.models.megatron import MegatronShape, MegatronTable, check_transformer_config, restrict
from transports.memory.shm import DTYPES


@dataclass(frozen=True)
class _Placed:
    """What a rank holds. By id of the parameter: `named`, `placed` and the ranks that own its ranges `together`;
    `held`: content key → first rank of the holders this rank belongs to; `sizes`: content key → elements."""

    named: Mapping[int, Named]
    placed: dict[int, list[Placement]]
    sides: Sequence[tuple[Named, BufferHome, list[Placement]]]
    together: Mapping[int, tuple[int, ...]]
    rank: int
    held: Mapping[str, int]
    sizes: Mapping[str, int]


class MegatronSource(Source):
    """One rank of a Megatron-Core job. Every rank of the job makes one, for the same steps."""

    def __init__(
        self,
        model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any,
        hf_config: Mapping[str, Any] | str | Path | Any,
        *,
        run: str,
        shape: MegatronShape | None = None,
        **options: Unpack[SourceOptions],
    ) -> None:
        """Describe what to publish; nothing is touched before `register`, which is a collective call.

        `model_chunks`: this rank's chunks as the training loop has them, wrapped or not. `optimizer`: what
        `get_megatron_optimizer` returned. `hf_config`: the Hugging Face configuration the rollout engines load: its
        dictionary, its object, or the path of a `config.json` or of the directory with it. `shape`: this rank's
        coordinates, when they are not those of Megatron's `parallel_state`. Options: `SourceOptions`.
        """
        wrapped = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
        self._chunks = [unwrap(chunk) for chunk in wrapped]
        self._megatron = optimizer
        self._config = read_config(hf_config)
        self._shape = shape
        self._loads = 0
        super().__init__(inner_optimizers(optimizer), self._chunks, run=run, **options)

    def _declare(self, planner: Planner) -> None:
        here, said = exchange(
            self._place,
            lambda placed: sorted((key, first, placed.sizes[key]) for key, first in placed.held.items()),
            self._group,
        )
        named, placed, sides = here.named, here.placed, here.sides
        together, me, owners = here.together, here.rank, spread(said)
        # A rank that holds the same twice compares one of the two; which one all its fellow holders know.
        compared = {content_key(p): number for number, p in reversed(placed.items())}

        def add(shard: OwnedShard, placements: Sequence[Placement], n: Named, first: int) -> None:
            key = content_key(placements)
            cell = key if self._replica_digests and key in owners.shared else None
            if owners.first[key] == first:
                planner.add_shard(replace(shard, cell=cell))
            elif cell is not None and compared.get(key, id(n.tensor)) == id(n.tensor):
                planner.add_shard(replace(shard, cell=cell, holders=first))
            else:
                for placement in placements:
                    planner.add_elsewhere(placement.tensor.name, shard.home.param)

        for m in masters(self._megatron):
            if id(m.param) not in named:
                raise InvalidInput("the optimizer has a parameter that no model chunk has.", remedy="Pass all chunks.")
            n = named[id(m.param)]
            shard = _shard(n, placed[id(m.param)], PlainHome(m.master), m.start, m.stop, mirrored=m.aliased)
            add(shard, placed[id(m.param)], n, min(m.holders))
        stepped = {id(m.param) for m in masters(self._megatron)} | set(together)
        for number, n in named.items():
            if number not in stepped:
                add(_shard(n, placed[number], PlainHome(n.tensor), 0, n.tensor.numel()), placed[number], n, me)
        for n, home, placements in sides:
            shard = _shard(n, placements, home, 0, n.tensor.numel(), mirrored=True, detector="snapshot")
            add(shard, placements, n, me)

    def _place(self) -> _Placed:
        """Where everything this rank holds lies in the checkpoint."""
        for chunk in self._chunks:
            check_transformer_config(getattr(chunk, "config", None))
        table = MegatronTable(self._config, self._shape or current_shape(), dtypes=self._dtypes)
        named = {id(n.tensor): n for n in parameters(self._chunks)}
        self._refuse_stale(named)
        placed = {key: table.placements(n.name, n.tensor.shape, layer=n.layer) for key, n in named.items()}
        sides = []
        for n, module, attribute in buffers(self._chunks):
            placements = table.placements(n.name, n.tensor.shape, layer=n.layer)
            sides.append((n, BufferHome(module, attribute, DTYPES[placements[0].tensor.dtype]), placements))
        together = holders_of(self._megatron)
        me = dist.get_rank() if dist.is_initialized() else 0
        held = {content_key(p): min(together.get(key, (me,))) for key, p in placed.items()}
        held |= {content_key(p): me for _, _, p in sides}
        sizes = {content_key(p): named[key].tensor.numel() for key, p in placed.items()}
        sizes |= {content_key(p): n.tensor.numel() for n, _, p in sides}
        return _Placed(named, placed, sides, together, me, held, sizes)

    def _check(self) -> None:
        loads = self._registered().watch.loads
        if loads != self._loads:
            self._refuse_stale({id(n.tensor): n for n in parameters(self._chunks)})
            self._loads = loads

    def _refuse_stale(self, named: Mapping[int, Named]) -> None:
        check_masters(masters(self._megatron), {key: n.name for key, n in named.items()})


def content_key(placements: Sequence[Placement]) -> str:
    """The same for two local parameters exactly if they hold the same canonical elements in the same order."""
    text = json.dumps([p.to_json() for p in placements], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def current_shape() -> MegatronShape:
    """This rank's coordinates in Megatron's `parallel_state`."""
    from megatron.core import parallel_state

    ps: Any = parallel_state
    return MegatronShape(
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        ep_size=ps.get_expert_model_parallel_world_size(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        etp_size=ps.get_expert_tensor_parallel_world_size(),
    )


def read_config(given: Mapping[str, Any] | str | Path | Any) -> dict[str, Any]:
    """The configuration as a dictionary. InvalidInput if it is none."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str | Path):
        path = Path(given)
        path = path / "config.json" if path.is_dir() else path
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} is not a model's config.json: {error}.") from None
        if isinstance(found, dict):
            return found
    elif callable(to_dict := getattr(given, "to_dict", None)):
        return dict(to_dict())
    raise InvalidInput(
        "hf_config is neither a configuration nor the path of one.",
        remedy="Pass the directory of the checkpoint that the rollout engines start from.",
    )


def _shard(
    n: Named,
    placements: Sequence[Placement],
    home: Home,
    start: int,
    stop: int,
    *,
    mirrored: bool = False,
    detector: Detector | None = None,
) -> OwnedShard:
    """Elements [start, stop) of a local parameter, which are all of `home`'s memory."""
    runs = tuple(
        OwnedRun(r.tensor.name, r.tensor.shape, r.start - start, r.numel, r.layout, r.tensor.dtype, detector)
        for r in restrict(placements, start, stop)
    )
    return OwnedShard(n.name, home, runs, mirrored=mirrored)
