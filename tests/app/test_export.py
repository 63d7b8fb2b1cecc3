"""`dte export`: what appears is the version bit for bit, loads as it is, and appears whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from app import exporting
from app.cli.export import run_export
from app.exporting import Exported, ExportFailed, plan_shards, size_of
from engine.errors import DteError, InvalidInput, ProofError
from engine.records import TensorDigest
from tests.support.command import dte
from tests.support.versions import Publisher, State, changed, metas_of
from transports.store.local import LocalStore

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.embed.weight": ((300, 40), "bfloat16"),
    "model.layers.0.weight": ((70, 100), "bfloat16"),
    "model.scale": ((), "float32"),
    "model.router.bias": ((9,), "float32"),
    "model.mask": ((7,), "uint8"),
    "model.counter": ((3,), "int64"),
    "model.nothing": ((0, 4), "bfloat16"),
}


def first_state() -> State:
    rng = np.random.default_rng(3)
    out = {}
    for name, (shape, dtype) in SHAPES.items():
        size = int(np.prod(shape)) * {"bfloat16": 2, "float32": 4, "uint8": 1, "int64": 8}[dtype]
        data = rng.integers(0, 256, size + size % 2, dtype=np.uint8)
        data[size:] = 0
        out[name] = data.view(np.uint16)
    return out


def next_state(state: State, rng: np.random.Generator) -> State:
    out = changed(state, rng)
    out["model.mask"] = state["model.mask"]  # its last lane is half padding
    return out


class Run:
    """A store with versions 0, 1, (2: aborted), 3, 4, and a base directory."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.base = folder / "base"
        self.base.mkdir()
        (self.base / "config.json").write_text('{"dtype": "bfloat16"}')
        (self.base / "tokenizer.json").write_text("{}")
        for weights in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", ".hidden"):
            (self.base / weights).write_text("old")
        (self.base / "folder").mkdir()
        self.out = folder / "exported" / "checkpoint"
        self.out.parent.mkdir()
        self.states: dict[int, State] = {}
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        rng = np.random.default_rng(5)
        async with LocalStore(self.store) as store:
            publisher = Publisher(store, metas_of(SHAPES), writers=2)
            state = first_state()
            for n in range(4):
                await publisher.publish(state, dense=["model.router.bias"] if n == 2 else (), step=10 * n)
                if n == 1:
                    await publisher.abort()
                state = next_state(state, rng)
            self.states = publisher.states

    async def anchor(self, version: int) -> None:
        async with LocalStore(self.store) as store:
            publisher = Publisher(store, metas_of(SHAPES), writers=2)
            publisher.states = self.states
            await publisher.anchor(version)

    def export(self, version: str = "latest", **options: int) -> Exported:
        return run_export(version, self.out, store=str(self.store), run=None, base=self.base, token=None, **options)

    def chunks(self, version: int) -> list[Path]:
        return sorted((self.store / "runs" / "r" / "versions" / str(version)).rglob("*.dtc"))

    def left_over(self) -> list[str]:
        return sorted(p.name for p in self.out.parent.iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def read(folder: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    out = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            for name in handle.keys():  # noqa: SIM118
                assert name not in out
                t = handle.get_tensor(name)
                raw = t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
                out[name] = (tuple(t.shape), str(t.dtype).removeprefix("torch."), raw)
    return out


def expected(state: State) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    out = {}
    for name, (shape, dtype) in SHAPES.items():
        meta = TensorDigest(name=name, shape=shape, dtype=dtype, digest="0" * 16)  # type: ignore[arg-type]
        out[name] = (shape, dtype, state[name].tobytes()[: size_of(meta)])
    return out


@pytest.mark.parametrize("version", [0, 1, 3, 4])
def test_the_files_hold_the_version_bit_for_bit(run: Run, version: int) -> None:
    done = run.export(str(version))
    assert read(run.out) == expected(run.states[version])
    assert (done.version, done.step, done.tensors) == (version, {0: 0, 1: 10, 3: 20, 4: 30}[version], len(SHAPES))
    assert done.weight_bytes == sum(len(v[2]) for v in expected(run.states[0]).values())
    assert sorted(p.name for p in run.out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert run.left_over() == ["checkpoint"]


def test_large_models_fall_into_shards_with_an_index(run: Run) -> None:
    done = run.export(shard_bytes=20_000)
    assert read(run.out) == expected(run.states[4])
    index = json.loads((run.out / "model.safetensors.index.json").read_text())
    assert len(done.shards) > 1
    assert set(index["weight_map"].values()) == set(done.shards)
    assert index["metadata"]["total_size"] == done.weight_bytes
    for name, file in index["weight_map"].items():
        with safe_open(run.out / file, framework="pt") as handle:
            assert name in handle.keys()  # noqa: SIM118


def test_shards_pass_the_bound_only_with_one_tensor() -> None:
    sizes = [10, 50, 200, 10, 10, 80, 20]
    metas = [TensorDigest(name=f"t{i}", shape=(n,), dtype="uint8", digest="0" * 16) for i, n in enumerate(sizes)]
    shards = plan_shards(metas, 100)
    assert [[size_of(m) for m in g] for g in shards.values()] == [[10, 50], [200], [10, 10, 80], [20]]
    assert list(shards)[1] == "model-00002-of-00004.safetensors"


def test_an_anchor_is_enough(run: Run) -> None:
    asyncio.run(run.anchor(3))
    for version in (0, 1, 3):
        for chunk in run.chunks(version):
            chunk.unlink()
    run.export("4")
    assert read(run.out) == expected(run.states[4])


def test_the_versions_own_anchor_is_used(run: Run) -> None:
    asyncio.run(run.anchor(3))
    for version in (0, 1, 3, 4):
        for chunk in run.chunks(version):
            chunk.unlink()
    run.export("3")
    assert read(run.out) == expected(run.states[3])


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_chunk_is_an_error_and_leaves_nothing(run: Run, damage: str) -> None:
    chunk = run.chunks(1)[0]
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.unlink()
    if damage != "gone":
        chunk.write_bytes(bytes(data) if damage == "flip" else bytes(data[:-1]))
    with pytest.raises(DteError):
        run.export("4")
    assert run.left_over() == []
    run.export("0")
    assert read(run.out) == expected(run.states[0])


def test_wrong_bits_behind_right_hashes_are_caught_by_the_digest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exporting.Rebuilder.tensor

    def wrong(self: exporting.Rebuilder, name: str) -> np.ndarray:
        lanes = real(self, name)
        if name == "model.layers.0.weight":
            lanes[5] ^= 1
        return lanes

    monkeypatch.setattr(exporting.Rebuilder, "tensor", wrong)
    with pytest.raises(ProofError, match=r"model\.layers\.0\.weight"):
        run.export()
    assert run.left_over() == []


def test_a_disk_that_fails_is_said_and_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ExportFailed, match="No space left"):
        run.export()
    assert run.left_over() == []


def test_a_full_disk_is_said_before_the_shard_is_gathered(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(np, "memmap", None)
    with pytest.raises(ExportFailed, match="No space left"):
        run.export()
    assert run.left_over() == []


def test_a_configuration_for_quantized_weights_is_refused(run: Run) -> None:
    (run.base / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    with pytest.raises(InvalidInput, match="quantization_config"):
        run.export()
    assert run.left_over() == []


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_that_differ_are_refused(tmp_path: Path, tied: bool, same: bool) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    state = {n: np.arange(24, dtype=np.uint16) for n in names}
    if not same:
        state[names[1]][7] ^= 1

    async def publish() -> None:
        async with LocalStore(tmp_path / "store") as store:
            await Publisher(store, metas_of(dict.fromkeys(names, ((6, 4), "bfloat16")))).publish(state)

    asyncio.run(publish())
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    out = tmp_path / "out"
    options: dict[str, Any] = {"store": str(tmp_path / "store"), "run": "r", "base": base, "token": None}
    if tied and not same:
        with pytest.raises(InvalidInput, match="ties the word embeddings"):
            run_export("0", out, **options)
        assert not out.exists()
    else:
        assert run_export("0", out, **options).tensors == 2


def test_what_exists_is_never_overwritten(run: Run) -> None:
    run.out.mkdir()
    with pytest.raises(InvalidInput, match="exists"):
        run.export()
    run.out.rmdir()
    run.out.symlink_to("nowhere")
    with pytest.raises(InvalidInput, match="exists"):
        run.export()


@pytest.mark.parametrize(("version", "says"), [("2", "no committed"), ("9", "no committed"), ("-1", "no version")])
def test_a_version_that_is_none_is_refused(run: Run, version: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        run.export(version)
    assert run.left_over() == []


def test_a_base_without_configuration_is_refused(run: Run) -> None:
    (run.base / "config.json").write_text("not json")
    with pytest.raises(InvalidInput, match="not JSON"):
        run.export()


def test_another_dtype_in_the_configuration_is_noted(run: Run) -> None:
    (run.base / "config.json").write_text('{"torch_dtype": "float16"}')
    (note,) = run.export().notes
    assert "float16" in note


def test_the_command(run: Run) -> None:
    command = ("export", "3", str(run.out), "--store", str(run.store), "--base", str(run.base))
    done = dte(*command, "--json")
    said = json.loads(done.stdout)
    assert (said["ok"], said["version"], said["copied"]) == (True, 3, ["config.json", "tokenizer.json"])
    again = dte(*command)
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it_as_it_is(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(1)
    base = tmp_path / "base"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base)
    model = LlamaForCausalLM.from_pretrained(base)
    parameters = dict(model.named_parameters())
    shapes = {n: (tuple(p.shape), "bfloat16") for n, p in parameters.items()}

    def state() -> State:
        return {
            n: p.detach().reshape(-1).view(torch.int16).numpy().view(np.uint16).copy() for n, p in parameters.items()
        }

    async def publish() -> None:
        async with LocalStore(tmp_path / "store") as store:
            publisher = Publisher(store, metas_of(shapes))
            await publisher.publish(state())
            with torch.no_grad():
                for p in parameters.values():
                    p.add_(torch.randn_like(p) * 0.01)
            await publisher.publish(state())

    asyncio.run(publish())
    out = tmp_path / "out"
    run_export("1", out, store=str(tmp_path / "store"), run="r", base=base, token=None, shard_bytes=20_000)
    loaded = LlamaForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    for name, p in loaded.named_parameters():
        assert torch.equal(p, parameters[name]), name
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_a_version_that_is_dense_everywhere_needs_nothing_before_it(run: Run) -> None:
    async def publish() -> State:
        async with LocalStore(run.store.parent / "whole") as store:
            publisher = Publisher(store, metas_of(SHAPES))
            await publisher.publish(first_state())
            state = next_state(first_state(), np.random.default_rng(1))
            await publisher.publish(state, dense=list(SHAPES))
            return state

    state = asyncio.run(publish())
    run.store = run.store.parent / "whole"
    for chunk in run.chunks(0):
        chunk.unlink()
    run.export()
    assert read(run.out) == expected(state)
