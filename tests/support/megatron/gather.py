"""The dense reference: all weights of a running job as one set of full tensors, the obvious way.

Every rank sends its own parameters to rank 0, which joins the tensor-parallel parts, checks that replicas hold equal
bits and renames to Hugging Face names. It uses none of the product's layout code: what that code says is compared with
this. That this is right is shown by computing with it (`tests/megatron/test_rig.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron.train import Trainer

# How Megatron-Core's local spec splits a parameter over tensor-parallel ranks; a norm or a router is whole on each.
SPLIT_ROWS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_q_down_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_down_proj.weight",
    "linear_kv_up_proj.weight",
)
SPLIT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
# Not a parameter: it is changed outside the optimizer.
ROUTER_BIAS = "mlp.router.expert_bias"


class ReplicaError(AssertionError):
    """Ranks that should hold the same values do not."""


def gather_hf(
    trainer: Trainer, *, dtype: torch.dtype | None = torch.bfloat16, check_replicas: bool = True
) -> dict[str, torch.Tensor] | None:
    """Full tensors under Hugging Face names on rank 0, None elsewhere. Collective.

    Parameters are cast to `dtype` (None leaves them); router biases stay FP32. A tied output layer is left out. With
    `check_replicas`, raises `ReplicaError` on rank 0 where replicas differ.
    """
    full = gather_megatron(trainer, check_replicas=check_replicas)
    if full is None:
        return None
    tensors = to_hf(trainer.hf_config, full)
    if dtype is None:
        return tensors
    return {n: t if n.endswith("e_score_correction_bias") else t.to(dtype) for n, t in tensors.items()}


def gather_megatron(
    trainer: Trainer, *, check_replicas: bool = True, padding: bool = False
) -> dict[str, torch.Tensor] | None:
    """Full tensors under Megatron-Core names with global layer and expert numbers on rank 0, None elsewhere.

    Collective. The vocabulary is not padded unless `padding` asks for it, `linear_fc1` is all of gate above all of up,
    `linear_qkv` is Megatron-Core's own order of query groups. A tied output layer is left out.
    """
    trainer.sync_params()
    mine = {name: (parts_rank(trainer, name), tensor.detach()) for name, tensor in named_tensors(trainer)}
    ranks = _collect(mine)
    if ranks is None:
        return None
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank, tensors in enumerate(ranks):
        for name, (part, tensor) in tensors.items():
            known = parts.setdefault(name, {}).setdefault(part, tensor)
            if check_replicas and not torch.equal(_bits(known), _bits(tensor)):
                raise ReplicaError(f"{name}: rank {rank} holds other values than a replica, in part {part}")
    full = {name: join(name, [found[part] for part in sorted(found)]) for name, found in parts.items()}
    vocab = trainer.hf_config["vocab_size"]
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in full and not padding:
            full[name] = full[name][:vocab].clone()
    if trainer.hf_config["tie_word_embeddings"] and "output_layer.weight" in full:
        # With a pipeline, the last stage has a copy of the embedding.
        if check_replicas and not torch.equal(
            _bits(full["output_layer.weight"]), _bits(full["embedding.word_embeddings.weight"])
        ):
            raise ReplicaError("output_layer.weight: the last stage's copy of the embedding differs from the first's")
        del full["output_layer.weight"]
    return full


def named_tensors(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's parameters and router biases under names with global layer and expert numbers."""
    experts = trainer.config.num_moe_experts
    first = 0 if experts is None else experts // trainer.job.ep * trainer.coordinates.ep
    for wrapped in trainer.model_chunks:
        model: Any = wrapped
        while hasattr(model, "module"):
            model = model.module
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        biases = [(n, b) for n, b in model.named_buffers() if n.endswith(ROUTER_BIAS) and b is not None]
        for name, tensor in [*model.named_parameters(), *biases]:
            layer = re.match(r"decoder\.layers\.(\d+)\.", name)
            if layer is not None:
                name = f"decoder.layers.{numbers[int(layer[1])]}.{name[layer.end() :]}"
            yield re.sub(r"(?<=local_experts\.)\d+", lambda m: str(first + int(m[0])), name), tensor


def parts_rank(trainer: Trainer, name: str) -> int:
    """Which tensor-parallel part this rank holds: 0 of a parameter that is not split."""
    if not name.endswith(SPLIT_ROWS + SPLIT_COLUMNS):
        return 0
    return trainer.coordinates.etp if "local_experts" in name else trainer.coordinates.tp


def join(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The full tensor of tensor-parallel parts in rank order."""
    if name.endswith("linear_fc1.weight"):
        # Each rank has its part of the gate above its part of the up projection.
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(parts, dim=1 if name.endswith(SPLIT_COLUMNS) else 0)


# --- Hugging Face names ----------------------------------------------------------------------------------------------

OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
IN_LAYER = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "mlp.router": "mlp.gate",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}


def to_hf(hf: dict[str, Any], full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full tensors under Megatron-Core names as the tensors of a Hugging Face checkpoint."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in full.items():
        if name in OUTSIDE:
            out[OUTSIDE[name]] = tensor
            continue
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias|expert_bias)", name)
        if found is None:
            raise KeyError(f"no Hugging Face name is known for {name}")
        for short, part in _in_layer(hf, found[2], found[3], tensor):
            out[f"model.layers.{found[1]}.{short}"] = part.contiguous()
    return out


def _in_layer(hf: dict[str, Any], module: str, kind: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if module == "self_attention.linear_qkv":
        return [(f"self_attn.{n}_proj.{kind}", t) for n, t in zip("qkv", _split_qkv(hf, tensor), strict=True)]
    if kind == "expert_bias":
        return [("mlp.gate.e_score_correction_bias", tensor)]
    mixtral = hf["model_type"] == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])", module)
    if expert is not None:
        room = f"{'block_sparse_moe' if mixtral else 'mlp'}.experts.{expert[1]}"
        if expert[2] == "linear_fc2":
            return [(f"{room}.{down}.weight", tensor)]
        return [(f"{room}.{n}.weight", t) for n, t in zip((gate, up), tensor.chunk(2), strict=True)]
    if module in ("mlp.linear_fc1", "mlp.shared_experts.linear_fc1"):
        room = module.removesuffix(".linear_fc1")
        return [(f"{room}.{n}.weight", t) for n, t in zip((gate, up), tensor.chunk(2), strict=True)]
    if mixtral and module == "mlp.router":
        return [("block_sparse_moe.gate.weight", tensor)]
    if hf["model_type"] == "deepseek_v3" and module == "self_attention.q_layernorm":
        return [("self_attn.q_a_layernorm.weight", tensor)]
    return [(f"{IN_LAYER[module]}.{kind}", tensor)]


def _split_qkv(hf: dict[str, Any], tensor: torch.Tensor) -> list[torch.Tensor]:
    """Rows come by query group: the group's query heads, its key head, its value head."""
    groups = hf["num_key_value_heads"]
    head = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    queries = hf["num_attention_heads"] // groups
    by_group = tensor.reshape(groups, (queries + 2) * head, *tensor.shape[1:])
    parts = torch.split(by_group, [queries * head, head, head], dim=1)
    return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


# --- transport -------------------------------------------------------------------------------------------------------


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _collect(mine: dict[str, tuple[int, torch.Tensor]]) -> list[dict[str, tuple[int, torch.Tensor]]] | None:
    """Every rank's tensors on rank 0: a JSON header and the bytes, from each rank in turn."""
    header = [[n, part, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, (part, t) in mine.items()]
    head = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    body = torch.cat([_bits(tensor) for _, tensor in mine.values()])
    sizes = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(head), len(body)]))
    if dist.get_rank() != 0:
        dist.send(head, 0)
        dist.send(body, 0)
        return None
    ranks = [_unpack(head, body)]
    for rank in range(1, dist.get_world_size()):
        head, body = (torch.empty(int(size), dtype=torch.uint8) for size in sizes[rank])
        dist.recv(head, rank)
        dist.recv(body, rank)
        ranks.append(_unpack(head, body))
    return ranks


def _unpack(head: torch.Tensor, body: torch.Tensor) -> dict[str, tuple[int, torch.Tensor]]:
    tensors: dict[str, tuple[int, torch.Tensor]] = {}
    at = 0
    for name, part, dtype_name, shape in json.loads(bytes(head.tolist())):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        # Cloned, for a view of another dtype must start at a multiple of its size.
        tensors[name] = (part, body[at : at + size].clone().view(dtype).reshape(shape))
        at += size
    return tensors
