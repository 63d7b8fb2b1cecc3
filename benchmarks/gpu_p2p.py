"""Checks rank to rank transfer over NCCL: run it on a machine that has two GPUs or more.

    python -m benchmarks.gpu_p2p [--mib 256]

Starts one process a GPU, connects them, and compares what arrives with what was sent: empty messages, single bytes,
large ones, several at once; then one member leaves, and the other must get an error and be able to join a new group.
The rate is printed. Also checked, with one GPU or more: that two members on one GPU are refused.

Exits with 0 if everything agrees, 1 if something does not, 2 if there are too few GPUs. `--kind gloo` runs the same
over Gloo without a GPU, which proves the script, and nothing about NCCL.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np
import torch

from transports.p2p.base import Carrier
from transports.p2p.errors import DeviceShared, ExchangeTimeout, P2PError, PeerLost
from transports.p2p.process_group import Kind, connect, host_store

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
LENGTHS = (0, 1, 0, 4096, 7, 0)


def bytes_of(seed: int, n: int) -> np.ndarray:
    """The same bytes in every process."""
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def ensure(good: bool, what: str) -> None:
    """End with 1 unless `good`."""
    if not good:
        print(f"FAILED: {what}", file=sys.stderr)
        raise SystemExit(1)


def join(port: int, group: str, rank: int, kind: Kind, gpu: int) -> Carrier:
    """Member `rank` of two."""
    device = torch.device("cuda", gpu) if kind == "nccl" else None
    return connect((HOST, port), group, rank, 2, kind=kind, timeout_s=TIMEOUT_S, device=device)


def exchange(carrier: Carrier, mib: int) -> None:
    """Member 0 sends, member 1 receives and compares."""
    lengths = [*LENGTHS, *[mib << 18] * 4]
    deadline = time.monotonic() + TIMEOUT_S
    started = time.perf_counter()
    if carrier.rank == 0:
        for pending in [carrier.send(bytes_of(seed, n), 1) for seed, n in enumerate(lengths)]:
            pending.wait(deadline)
        return
    got = [np.zeros(n, np.uint8) for n in lengths]
    for pending in [carrier.receive(into, 0) for into in got]:
        pending.wait(deadline)
    seconds = time.perf_counter() - started
    ensure(all(np.array_equal(a, bytes_of(seed, a.size)) for seed, a in enumerate(got)), "what arrived")
    print(f"{sum(lengths) / 2**20:.0f} MiB in {seconds:.3f} s, made and copied to and from the device", flush=True)


def member(port: int, rank: int, kind: Kind, mib: int, gpus: int) -> None:
    """One process of the check."""
    if kind == "nccl":
        try:
            join(port, "shared", rank, kind, 0).close()
            ensure(False, "two members on one GPU were not refused")
        except DeviceShared as error:
            print(f"member {rank}: refused, as it must be: {error}", flush=True)
        if gpus < 2:
            return
    carrier = join(port, "first", rank, kind, rank)
    exchange(carrier, mib)
    if rank == 0:
        carrier.close()
    else:
        try:
            carrier.receive(np.zeros(1, np.uint8), 0).wait(time.monotonic() + 10.0)
            ensure(False, "a member that left was not noticed")
        except (PeerLost, ExchangeTimeout) as error:
            print(f"member {rank}: {type(error).__name__}, as it must be", flush=True)
        carrier.close()
    again = join(port, "second", rank, kind, rank)
    exchange(again, 1)
    again.close()


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description="Checks rank to rank transfer over NCCL.")
    parser.add_argument("--kind", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--mib", type=int, default=256, help="MiB to transfer (256)")
    parser.add_argument("--member", type=int, nargs=2, metavar=("PORT", "RANK"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    if given.kind == "nccl" and gpus < 1:
        print("no GPU: this check needs two (or --kind gloo, to try the script itself).", file=sys.stderr)
        return 2
    if given.member:
        try:
            member(*given.member, given.kind, given.mib, gpus)
        except P2PError as error:
            print(f"FAILED: member {given.member[1]}: {error!r}", file=sys.stderr)
            return 1
        return 0
    store, port = host_store(HOST)
    command = [sys.executable, "-m", "benchmarks.gpu_p2p", "--kind", given.kind, "--mib", str(given.mib), "--member"]
    members = [subprocess.Popen([*command, str(port), str(rank)]) for rank in (0, 1)]
    codes = [process.wait() for process in members]
    del store
    if any(codes):
        return 1
    if given.kind == "nccl" and gpus < 2:
        print("one GPU: only the refusal was checked, the transfer needs two.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
