"""`dte bench construct`: seconds to find what a step changed, beside the least anybody could need: reading the state.

Invariant: what is timed is also checked. Every repetition of a detector must report exactly the elements that really
changed (ambiguous ones resolved by the proof), or the benchmark fails.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.bench.state import Workload, say, workload
from app.cli.output import print_table
from engine.bf16 import round_to_bf16_bits
from engine.detect import backends
from engine.detect.base import Detection, SliceGeometry, tile_count
from engine.detect.geometry import tile_digests
from engine.detect.snapshot import detect_snapshot
from engine.errors import ProofError
from engine.optimizers import selftest
from engine.proof import resolve
from engine.records import sha256_hex

SAMPLE_ELEMENTS = 4 << 20

Found = list[tuple[SliceGeometry, slice, Detection]]
Slices = list[tuple[SliceGeometry, slice]]


@dataclass(frozen=True)
class Contender:
    """Something to time: `bytes_per_element` is what it must read of each of its `elements`."""

    name: str
    bytes_per_element: int
    elements: int
    run: Callable[[], Found | None]


def run_construct(record: Path | None, *, repeats: int, threads: int, reference: bool, json_output: bool) -> None:
    """Measure and print."""
    work = workload(record)
    torch.set_num_threads(threads)
    exact = selftest.passes(work.formula).ok
    contenders = _contenders(work, threads, exact, reference=reference)
    differs = work.new_bits() != work.prev_bits
    truth = int(differs.sum())
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    for round_number in range(repeats + 1):
        for contender in contenders:
            start = time.perf_counter()
            found = contender.run()
            seconds = time.perf_counter() - start
            # The first round compiles, warms caches, and is where the result is checked.
            if round_number:
                times[contender.name].append(seconds)
            elif found is not None:
                _check(contender.name, work, found, differs)
        say(f"round {round_number} of {repeats}" + (" (warm-up, results checked)" if round_number == 0 else ""))
    medians = {name: statistics.median(t) for name, t in times.items()}
    _report(work, contenders, medians, truth, repeats=repeats, threads=threads, exact=exact, json_output=json_output)


def _contenders(work: Workload, threads: int, exact: bool, *, reference: bool) -> list[Contender]:
    everything = list(work.slices())
    # The reference backend is two orders of magnitude slower: it goes through a sample of the tensors.
    sample = _sample(everything)

    def certified(name: str, slices: Slices) -> Callable[[], Found]:
        backend = backends.get(name, threads=threads)

        def run() -> Found:
            out: Found = []
            for geometry, at in slices:
                theta, m, v = work.theta[at], work.exp_avg[at], work.exp_avg_sq[at]
                tiles = tile_count(theta.numel())
                found = backend.detect(work.formula, work.ctx, theta, m, v, geometry, 0, tiles, exact_replay=exact)
                out.append((geometry, at, found))
            return out

        return run

    def snapshot() -> Found:
        out: Found = []
        for geometry, at in everything:
            bits = round_to_bf16_bits(work.theta[at])
            out.append((geometry, at, detect_snapshot(work.prev_bits[at], bits, geometry, 0, tile_count(bits.size))))
        return out

    def read() -> None:
        # As 64-bit integers: a plain streaming pass that no floating-point order slows down.
        for array in (work.theta, work.exp_avg, work.exp_avg_sq):
            even = array[: array.numel() // 2 * 2]
            even.view(torch.int64).sum()

    contenders = [
        Contender("read", 12, work.numel, read),
        Contender("cpu", 12, work.numel, certified("cpu", everything)),
        Contender("snapshot", 6, work.numel, snapshot),
    ]
    if reference:
        contenders.append(Contender("reference", 12, _elements(sample), certified("reference", sample)))
    return contenders


def _elements(slices: Slices) -> int:
    return sum(at.stop - at.start for _, at in slices)


def _sample(slices: Slices) -> Slices:
    """Tensors from all over the model that have at most SAMPLE_ELEMENTS together; at least one."""
    picked: Slices = []
    for geometry, at in sorted(slices, key=lambda s: hash_order(s[0].tensor)):
        if _elements(picked) + at.stop - at.start <= SAMPLE_ELEMENTS:
            picked.append((geometry, at))
    return picked or [min(slices, key=lambda s: s[1].stop - s[1].start)]


def hash_order(name: str) -> str:
    """An order of tensors that is the same everywhere and has nothing to do with their place in the model."""
    return sha256_hex(name.encode())


def _check(name: str, work: Workload, found: Found, differs: npt.NDArray[np.bool_]) -> None:
    for geometry, at, detection in found:
        before = work.prev_bits[at]
        resolved = resolve(detection, tile_digests(geometry, before, 0), geometry)
        if resolved.dense.any():
            raise ProofError(f"{name} could not explain {int(resolved.dense.sum())} tiles of {geometry.tensor}.")
        if not np.array_equal(resolved.ranks, np.flatnonzero(differs[at])):
            raise ProofError(f"{name} did not find exactly what changed in {geometry.tensor}.")
        if not np.array_equal(resolved.old, before[resolved.ranks]):
            raise ProofError(f"{name} reported wrong old bits in {geometry.tensor}.")


def _report(
    work: Workload,
    contenders: list[Contender],
    medians: dict[str, float],
    truth: int,
    *,
    repeats: int,
    threads: int,
    exact: bool,
    json_output: bool,
) -> None:
    rates = {c.name: c.bytes_per_element * c.elements / medians[c.name] / 1e9 for c in contenders}
    note = {
        "read": "θ, m and v, summed: the floor",
        "cpu": "certified, no copy of the old weights",
        "snapshot": "needs a second copy of the weights in BF16",
        "reference": "certified, plain torch, on a sample of "
        + ", ".join(f"{c.elements:,} parameters" for c in contenders if c.name == "reference"),
    }
    print_table(
        ("what", "seconds", "GB/s", "of reading", "note"),
        [
            (
                c.name,
                f"{medians[c.name]:.3f}",
                f"{rates[c.name]:.1f}",
                f"{rates[c.name] / rates['read']:.0%}" if c.bytes_per_element == 12 else "-",
                note[c.name],
            )
            for c in contenders
        ],
        title=f"{work.numel:,} parameters, {truth:,} changed, {threads} threads, medians of {repeats}",
    )
    if json_output:
        result: dict[str, Any] = {
            "bench": "construct",
            "parameters": work.numel,
            "changed": truth,
            "changed_fraction": truth / work.numel,
            "threads": threads,
            "repeats": repeats,
            "exact_replay": exact,
            "seconds": medians,
            "gb_per_s": rates,
            "elements": {c.name: c.elements for c in contenders},
            "missed": 0,
            "cpu_of_read": medians["read"] / medians["cpu"],
        }
        if "reference" in medians:
            result["cpu_times_reference"] = rates["cpu"] / rates["reference"]
        print(json.dumps(result))
