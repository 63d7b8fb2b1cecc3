"""Checks and measures weights and optimizer state that lie on a GPU: run it on a machine that has one.

    python -m benchmarks.gpu_check [--device cuda:0] [--mib 1024]

1. Lanes on the device against lanes in host memory, bit for bit, on random layouts (digest, gather, scatter, runs).
2. A version is prepared, committed, rolled back, and installed in a small module on the device, through the session
   that receivers use.
3. How fast the digest and the scatter are, as ratios to a dense `copy_` of the same bytes in the same run.
4. `benchmarks.gpu_memory`: real AdamW steps on the device, read by another process over CUDA IPC (with and without
   expandable segments) and as copies, detected by both backends, compared bit for bit; the formulas' self-tests; that
   freed memory comes back.

Exits with 0 if everything agrees, 1 if something does not, 2 if there is no such device. Takes less than five minutes.
`--device cpu` runs all of it without a GPU, which proves the script, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from clients.rollout.torch import ModuleWeights
from engine.apply import Applier, ChunkFile, DeviceLanes, LaneView, Target
from engine.apply.device import SCRATCH_BYTES
from engine.codec.chunk import ChunkHeader, ChunkItem, encode
from engine.digest import DigestKey, digest_array, to_hex
from engine.layout.algebra import identity, to_json
from engine.layout.blocks import Block, Layout
from engine.records import TensorDigest, sha256_hex

ALLOCATORS = (("", "ipc,mirror"), ("expandable_segments:True", "ipc"))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def ensure(right: bool, what: str) -> None:
    """End the run with 1 unless `right`."""
    if not right:
        print(f"WRONG: {what}", file=sys.stderr)
        raise SystemExit(1)


def random_layout(rng: np.random.Generator, rows: int, columns: int) -> Layout:
    """A slice of a larger tensor: whole, some rows, some columns, transposed, or in two blocks with a gap between."""
    kind, n = int(rng.integers(5)), rows * columns
    if kind == 0:
        return identity(n)
    if kind == 1:
        start = int(rng.integers(0, 10_000))
        return Layout((Block((n,), 0, (1,), start, (1,)),), n, start + n)
    if kind == 2:
        first = int(rng.integers(0, 100))
        wide = columns + first + int(rng.integers(0, 100))
        return Layout((Block((rows, columns), 0, (columns, 1), first, (wide, 1)),), n, rows * wide)
    if kind == 3:
        return Layout((Block((columns, rows), 0, (rows, 1), 0, (1, columns)),), n, n)
    cut = int(rng.integers(1, rows)) * columns
    blocks = (Block((cut,), 0, (1,), n - cut, (1,)), Block((n - cut,), cut, (1,), 0, (1,)))
    return Layout(blocks, n, n + 1)


def compare(device: torch.device, rounds: int) -> None:
    """Lanes on the device and in host memory, bit for bit."""
    rng = np.random.default_rng(0)
    for number in range(rounds):
        rows, columns = (int(x) for x in rng.integers(2, 1500, 2))
        layout = random_layout(rng, rows, columns)
        n = layout.src_numel
        state = rng.integers(0, 1 << 16, n).astype(np.uint16)
        odd = int(rng.integers(0, 4))
        dtype = torch.bfloat16 if odd or n % 2 else DTYPES[number % 3]
        whole = torch.zeros(n + odd, dtype=torch.int16, device=device)
        live = whole.narrow(0, odd, n).view(dtype)
        scratch = SCRATCH_BYTES if number % 2 else SCRATCH_BYTES // 64
        there, host = DeviceLanes(live, scratch_bytes=scratch), LaneView(state)
        there.write_run(0, state)
        key = DigestKey.for_tensor(f"t{number}")
        ensure(there.digest(key, layout) == host.digest(key, layout), f"digest of {layout}")
        index = rng.permutation(n)[: n // 3].astype(np.uint32)
        values = rng.integers(0, 1 << 16, index.size).astype(np.uint16)
        ensure(np.array_equal(there.gather(index), host.gather(index)), "gather")
        for lanes in (there, host):
            lanes.scatter(index, values)
        ensure(np.array_equal(there.run(0, n), state), "scatter, or a run")
        ensure(there.digest(key, layout) == host.digest(key, layout), "digest after a scatter")
        ensure(not bool(whole.narrow(0, 0, odd).any()), "the memory beside the tensor")
    print(f"lanes: {rounds} random layouts agree bit for bit")


def delta(folder: Path, before: dict[str, np.ndarray], after: dict[str, np.ndarray], model: nn.Module) -> Target:
    """Version 1 on version 0, as a daemon would hand it to a receiver."""
    none = np.empty(0, np.int64)
    items, tensors, base = [], [], {}
    for number, (name, old) in enumerate(before.items()):
        shape, new, key = tuple(model.get_parameter(name).shape), after[name], DigestKey.for_tensor(name)
        dtype = str(model.get_parameter(name).dtype).removeprefix("torch.")
        ranks = np.flatnonzero(new != old).astype(np.int64)
        blocks = to_json(identity(old.size))
        items.append(
            ChunkItem(
                name,
                shape,
                dtype,
                number,
                old.size,
                blocks,
                ranks,
                new[ranks] - old[ranks],
                none,
                none.astype(np.uint16),
            )
        )
        digest = to_hex(digest_array(key, new))
        tensors.append(TensorDigest.model_validate({"name": name, "shape": shape, "dtype": dtype, "digest": digest}))
        base[name] = to_hex(digest_array(key, old))
    coded = encode(ChunkHeader(run="check", version=1, epoch=1, writer=0, seq=0, base=0), items)
    path = folder / "chunk.dtc"
    path.write_bytes(coded.data)
    file = ChunkFile(path, sha256_hex(coded.data), len(coded.data), coded.raw_bytes, coded.entries)
    return Target("check", 1, 1, 0, tuple(tensors), base, (file,))


def install(device: torch.device) -> None:
    """Prepare, commit, roll back, commit again, on a module with BF16 and FP32 parameters."""
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(1000, 700, device=device).bfloat16())
    model.t = nn.Parameter(torch.randn(300, 500, device=device).bfloat16().t())
    model.n = nn.Parameter(torch.randn(333, device=device))

    def bits() -> dict[str, np.ndarray]:
        flat = {n: p.detach().contiguous().view(-1).view(torch.int16) for n, p in model.named_parameters()}
        return {n: f.cpu().numpy().view(np.uint16).copy() for n, f in flat.items()}

    rng, before = np.random.default_rng(1), bits()
    after = {n: np.where(rng.random(v.size) < 0.02, v + 1, v).astype(np.uint16) for n, v in before.items()}

    def holds(state: dict[str, np.ndarray]) -> bool:
        return all(np.array_equal(v, state[n]) for n, v in bits().items())

    weights = ModuleWeights(model)
    applier = Applier(weights.live())
    ours = weights.writes()
    with tempfile.TemporaryDirectory() as folder:
        target = delta(Path(folder), before, after, model)
        applier.prepare(target)
        ensure(holds(before), "prepare wrote something")
        applier.commit(1)
        ensure(holds(after), "the committed version")
        applier.rollback()
        ensure(holds(before), "the rollback")
        applier.prepare(target)
        applier.commit(1)
        applier.finalize(1)
        ensure(holds(after) and applier.prepare(target).already, "the installed version")
    ensure(weights.writes() == ours, "our own writes count as somebody else's")
    print("session: prepared, committed, rolled back, installed, bit for bit")


def seconds(device: torch.device, do: Callable[[], object], rounds: int) -> float:
    """The best of some rounds, the device idle before and after."""

    def wait() -> None:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)

    do()
    best = float("inf")
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        do()
        wait()
        best = min(best, time.perf_counter() - start)
    return best


def measure(device: torch.device, mib: int) -> None:
    """Digest and scatter, beside a dense copy of the same bytes."""
    lanes = mib << 19
    weights = torch.zeros(lanes, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(weights)
    view, key = DeviceLanes(weights), DigestKey.for_tensor("bench")
    side = 1 << (lanes.bit_length() // 2)
    n = side * (lanes // side)
    columns = Layout((Block((n // side, side), 0, (side, 1), 0, (2 * side, 1)),), lanes, 2 * lanes)
    changed = np.unique(np.random.default_rng(2).integers(0, lanes, lanes // 100)).astype(np.uint32)
    values = np.ones(changed.size, np.uint16)
    copy = seconds(device, lambda: other.copy_(weights), 5)
    rates = {
        "dense copy_": copy,
        "digest, one run": seconds(device, lambda: view.digest(key, identity(lanes)), 3),
        "digest, half of the columns": seconds(device, lambda: view.digest(key, columns), 3),
        "gather of 1 %": seconds(device, lambda: view.gather(changed), 3),
        "scatter of 1 %": seconds(device, lambda: view.scatter(changed, values), 3),
    }
    for name, took in rates.items():
        read = 2 * n if "columns" in name else 2 * changed.size if "1 %" in name else 2 * lanes
        print(f"{name:28} {took * 1e3:9.2f} ms {read / took / 1e9:9.2f} GB/s {took / copy:9.2f} × the time of copy_")
    print(f"scatter: {changed.size / rates['scatter of 1 %'] / 1e6:.1f} million lanes a second")
    if device.type == "cuda":
        del other
        torch.cuda.reset_peak_memory_stats(device)
        at = torch.cuda.memory_allocated(device)
        view.digest(key, columns)
        most = torch.cuda.max_memory_allocated(device) - at
        allowed = SCRATCH_BYTES + 8 * (columns.dst_numel // 4096 + 4096) + (1 << 20)  # words, and the pieces' sums
        ensure(most <= allowed, f"a digest took {most} bytes of device memory, {allowed} are allowed")
        print(f"scratch: {most / 2**20:.1f} MiB of device memory")


def trainer_memory(device: torch.device) -> None:
    """Part 4, once for each way in which torch may allocate: the choice is made when a process starts."""
    on_cuda = device.type == "cuda"
    for setting, modes in ALLOCATORS if on_cuda else (("", "auto,mirror"),):
        print(f"memory: PYTORCH_CUDA_ALLOC_CONF={setting!r}", flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu_memory", "--device", str(device), "--modes", modes]
        done = subprocess.run(command, env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}, check=False)
        if done.returncode == 3 and setting:
            print("memory: expandable segments cannot be opened by another process here; sources mirror them")
        else:
            ensure(done.returncode == 0, f"trainer memory with {setting or 'the default allocator'}")


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description="Checks and measures weights that lie on a GPU.")
    parser.add_argument("--device", default="cuda", help="a torch device (cuda)")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of weights to measure with (1024)")
    parser.add_argument("--rounds", type=int, default=60, help="random layouts to compare (60)")
    parser.add_argument("--no-memory", action="store_true", help="leave out part 4")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: this check needs one (or --device cpu, to try the script itself).", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(device) if device.type == 'cuda' else device}")
    compare(device, given.rounds)
    install(device)
    measure(device, given.mib)
    if not given.no_memory:
        trainer_memory(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
