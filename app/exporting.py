"""One version of a run as a Hugging Face checkpoint that serving engines load as it is.

Invariant: the directory appears under its name only when it is complete and every tensor, read back from the files
that were written, has the digest that the version's decision says. Whatever goes wrong leaves nothing behind.

Memory is one tensor and the cache of decoded chunks: a shard is gathered in a mapped file and written from there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.chain import Chain
from app.chains import only_run
from app.rebuilding import Rebuilder
from engine.digest import DigestKey, digest_array, to_hex
from engine.errors import DteError, InvalidInput, ProofError
from engine.records import ITEMSIZE, CommitDecision, TensorDigest
from transports.store.open import open_store

SHARD_BYTES = 5 << 30
_CONFIG = "config.json"
_WEIGHTS = re.compile(
    r"(\.(safetensors|bin|pt|pth|ckpt|gguf|onnx|msgpack|h5|ot)|\.(safetensors|bin|h5|msgpack)\.index\.json)$"
)


class ExportFailed(DteError):
    """The checkpoint could not be written."""

    code = "export-failed"


@dataclass(frozen=True)
class _Plan:
    directory: Path
    base: Path
    config: Mapping[str, Any]
    shard_bytes: int


@dataclass(frozen=True)
class Exported:
    """What was written. `copied` are the files that came from the base directory."""

    run: str
    version: int
    step: int
    directory: str
    tensors: int
    weight_bytes: int
    shards: tuple[str, ...]
    copied: tuple[str, ...]
    notes: tuple[str, ...]


def export_checkpoint(
    version: str,
    directory: Path,
    *,
    store: str,
    run: str | None,
    base: Path,
    token: str | None,
    shard_bytes: int = SHARD_BYTES,
    workdir: Path | None = None,
    signing_key: bytes | None = None,
) -> Exported:
    """Write the checkpoint. `version`: a number or `latest`. `base`: a directory with config and tokenizer files.

    `workdir`: folder for chunks and the shard being gathered, the parent of `directory` by default. `signing_key`:
    decisions must be signed with it. InvalidInput for arguments that cannot work, ProofError or a StoreError when the
    version cannot be rebuilt as decided.
    """
    number = _version_number(version)
    plan = _Plan(directory, base, read_config(base), shard_bytes)
    if shard_bytes < 1:
        raise InvalidInput(f"a shard needs room, not {shard_bytes} bytes.")
    with _folders(directory, workdir) as (scratch, partial):
        return asyncio.run(_export(plan, number, store, run, token, signing_key, scratch, partial))


def _version_number(text: str) -> int | None:
    if text == "latest":
        return None
    if not (text.isascii() and text.isdigit()):
        raise InvalidInput(f"{text!r} is no version.", remedy="Give a number from `dte versions`, or `latest`.")
    return int(text)


def read_config(base: Path) -> dict[str, Any]:
    """The configuration in a base directory; InvalidInput if it is none."""
    try:
        config = json.loads((base / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not JSON"
        raise InvalidInput(
            f"cannot read {base / _CONFIG}: {reason}.", remedy="--base is a checkpoint directory of the same model."
        ) from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{base / _CONFIG} is no model configuration.")
    return config


def _check_target(directory: Path) -> None:
    if directory.exists() or directory.is_symlink():
        raise InvalidInput(f"{directory} exists.", remedy="Name a directory that does not; it is never overwritten.")
    if not directory.absolute().parent.is_dir():
        raise InvalidInput(f"the folder {directory.absolute().parent} does not exist.", remedy="Make it first.")


@contextmanager
def _folders(directory: Path, workdir: Path | None) -> Iterator[tuple[Path, Path]]:
    """(for chunks, for the checkpoint until it is complete): both gone afterwards."""
    _check_target(directory)
    parent = directory.absolute().parent
    try:
        with (
            tempfile.TemporaryDirectory(prefix=f".{directory.name}.work-", dir=workdir or parent) as scratch,
            tempfile.TemporaryDirectory(prefix=f".{directory.name}.partial-", dir=parent) as partial,
        ):
            yield Path(scratch), Path(partial)
    except OSError as e:
        raise ExportFailed(
            f"the checkpoint cannot be written: {e.strerror or e}.", remedy="Check space and permissions."
        ) from e


async def _export(
    plan: _Plan,
    number: int | None,
    url: str,
    run: str | None,
    token: str | None,
    signing_key: bytes | None,
    scratch: Path,
    partial: Path,
) -> Exported:
    async with open_store(url, token) as store:
        name = run or await only_run(store)
        chain = Chain(name, store, signing_key=signing_key)
        await chain.refresh()
        if chain.head is None:
            raise InvalidInput(f"run {name!r} has no committed version in this store.", remedy="Check --run.")
        version = chain.head.version if number is None else number
        if not isinstance(chain.decisions.get(version), CommitDecision):
            raise InvalidInput(
                f"number {version} of run {name!r} is no committed version.", remedy="See `dte versions`."
            )
        rebuilt = await Rebuilder.open(chain, version, scratch, own_anchor=True)
        writing = asyncio.ensure_future(asyncio.to_thread(_write_all, plan, rebuilt, scratch, partial))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # nothing may write any more when the folders are removed
            raise


def _write_all(plan: _Plan, rebuilt: Rebuilder, scratch: Path, partial: Path) -> Exported:
    decision = rebuilt.decision
    metas = [rebuilt.meta(name) for name in rebuilt.order]
    _check_config(plan.config, rebuilt)
    total = sum(size_of(m) for m in metas)
    shards = plan_shards(metas, plan.shard_bytes)
    whole = partial / "checkpoint"
    whole.mkdir()
    copied = copy_base(plan.base, whole)
    for file, members in shards.items():
        _write_shard(rebuilt, members, whole / file, scratch / "shard")
        _prove_shard(whole / file, members)
    if len(shards) > 1:
        weight_map = {m.name: file for file, members in shards.items() for m in members}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (whole / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    for path in (*whole.iterdir(), whole):
        _sync(path)
    _check_target(plan.directory)
    whole.rename(plan.directory)
    _sync(plan.directory.absolute().parent)
    return Exported(
        decision.run,
        decision.version,
        decision.step,
        str(plan.directory),
        len(metas),
        total,
        tuple(shards),
        copied,
        tuple(_notes(plan.config, metas)),
    )


def plan_shards(metas: Sequence[TensorDigest], shard_bytes: int) -> dict[str, list[TensorDigest]]:
    """File name → tensors, in order; a file passes `shard_bytes` only with a single tensor that is larger."""
    groups: list[list[TensorDigest]] = [[]]
    held = 0
    for meta in metas:
        size = size_of(meta)
        if groups[-1] and held + size > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(meta)
        held += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}


def size_of(meta: TensorDigest) -> int:
    """Bytes of a canonical tensor."""
    count = ITEMSIZE[meta.dtype]
    for n in meta.shape:
        count *= n
    return count


def copy_base(base: Path, partial: Path) -> tuple[str, ...]:
    """Copy the files of `base` that are neither weights nor hidden; returns their names."""
    names = []
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not _WEIGHTS.search(path.name):
            shutil.copyfile(path, partial / path.name)
            names.append(path.name)
    return tuple(names)


def _write_shard(rebuilt: Rebuilder, members: Sequence[TensorDigest], path: Path, scratch: Path) -> None:
    """Gather the tensors in a mapped scratch file and let safetensors write them from there."""
    from safetensors.torch import save_file

    spans = [-(-size_of(m) // 8) * 8 for m in members]  # aligned, for dtypes of up to 8 bytes
    size = max(8, sum(spans))
    with scratch.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # on a full disk an error here, not a signal at a mapped hole
    held = np.memmap(scratch, np.uint8, "r+", shape=(size,))
    tensors: dict[str, torch.Tensor] = {}
    at = 0
    for meta, span in zip(members, spans, strict=True):
        end = at + size_of(meta)
        held[at:end] = rebuilt.tensor(meta.name).view(np.uint8)[: end - at]
        flat = torch.from_numpy(held[at:end])
        tensors[meta.name] = flat.view(getattr(torch, meta.dtype)).reshape(tuple(meta.shape))
        at += span
    save_file(tensors, path, metadata={"format": "pt"})
    scratch.unlink()


def _prove_shard(path: Path, members: Sequence[TensorDigest]) -> None:
    """ProofError unless the file holds exactly these tensors with the bits of their digests."""
    found = {name: (shape, dtype, digest) for name, shape, dtype, digest in _digests(path)}
    expected = {m.name: (tuple(m.shape), m.dtype, m.digest) for m in members}
    if found != expected:
        wrong = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        raise ProofError(
            f"{path.name} does not read back as it was written: {', '.join(wrong[:3])}.",
            remedy="The disk or the memory is at fault.",
        )


def _digests(path: Path) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            tensor = file.get_tensor(name)
            data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
            if data.size % 2:
                data = np.concatenate([data, np.zeros(1, np.uint8)])
            lanes = np.ascontiguousarray(data).view(np.uint16)
            digest = to_hex(digest_array(DigestKey.for_tensor(name), lanes))
            yield name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest


def _check_config(config: Mapping[str, Any], rebuilt: Rebuilder) -> None:
    """InvalidInput if an engine that goes by this configuration would not load the version's weights as they are."""
    if config.get("quantization_config"):
        raise InvalidInput(
            "the base's config.json has a `quantization_config`, but the version's weights are not quantized.",
            remedy="Give a base of the unquantized model, or remove that key from a copy of the base.",
        )
    if not config.get("tie_word_embeddings"):
        return
    shared = {n: rebuilt.meta(n) for n in rebuilt.order if n.endswith(("lm_head.weight", "embed_tokens.weight"))}
    heads = [m for n, m in shared.items() if n.endswith("lm_head.weight")]
    embeddings = [m for n, m in shared.items() if n.endswith("embed_tokens.weight")]
    if len(heads) != 1 or len(embeddings) != 1:
        return
    head, embedding = heads[0], embeddings[0]
    same = (tuple(head.shape), head.dtype) == (tuple(embedding.shape), embedding.dtype)
    if not same or not np.array_equal(rebuilt.tensor(head.name), rebuilt.tensor(embedding.name)):
        raise InvalidInput(
            f"the base's config.json ties the word embeddings, but {head.name!r} and {embedding.name!r} differ: an "
            "engine would serve the embeddings in place of the head.",
            remedy="Give a base whose config.json has `tie_word_embeddings` false.",
        )


def _notes(config: Mapping[str, Any], metas: Sequence[TensorDigest]) -> Iterator[str]:
    says = config.get("dtype") or config.get("torch_dtype")
    floats = {m.dtype for m in metas if m.dtype in ("bfloat16", "float16", "float32", "float64")}
    if says is not None and floats and str(says).removeprefix("torch.") not in floats:
        held = ", ".join(sorted(floats))
        yield f"config.json names {says}, the weights are {held}; an engine may cast them when it loads them."


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
