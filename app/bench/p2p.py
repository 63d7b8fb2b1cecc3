"""`dte bench p2p`: a version from trainer ranks to receiver ranks, beside sending all weights and beside PULSE's patch.

Invariants: everything that is compared runs in one run, over one group of processes and the same change, in turns that
begin elsewhere in every round; and a transfer that does not deliver exactly the change ends the benchmark.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.bench.p2p_case import Case, Shapes, llama, make_case, synthetic
from app.bench.p2p_members import MODEL, Members
from app.bench.state import recording, say
from app.cli.output import human_bytes, print_table
from app.settings import Settings
from engine.bf16 import round_to_bf16_bits
from engine.detect.base import U16
from engine.digest import DigestKey, add, digest_array, from_hex, to_hex
from engine.errors import InvalidInput, ProofError
from engine.models.boxes import row_major

PARAMETERS, CHANGED = 135_000_000, 0.01
BUCKETS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
PIECES = (32, 256, 2048)
"""Tensors that the same parameters are cut into, to see what operations cost."""
MESSAGE_BYTES = 4 << 20
"""Messages of the dense transfer from every sender to every receiver."""
GIGABIT = 1e9 / 8
METHODS = {
    "dense-broadcast": "all weights gathered on one rank, broadcast",
    "dense-direct": "the weights a receiver holds, from each sender",
    "patch-broadcast": "int32 index + BF16 value, gathered, broadcast, remapped",
    "ours": "two rounds, the receiver's own lanes, from each sender",
}


@dataclass(frozen=True)
class Options:
    """`changed` and `parameters` are of the synthetic model, None for the default, and must be None with a record."""

    record: Path | None = None
    parameters: int | None = None
    changed: float | None = None
    senders: int = 2
    receivers: int = 2
    rounds: int = 5
    seed: int = 0


@dataclass
class Measured:
    """One contender's rounds."""

    method: str
    bucket_bytes: int
    pieces: str
    seconds: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    bytes_total: int = 0
    bytes_received: list[int] = field(default_factory=list)
    link_bytes: int = 0
    messages: int = 0

    def add(self, answers: Sequence[Mapping[str, Any]], senders: int) -> None:
        """One transfer, as its members saw it; times of one machine's clock."""
        at = started = min(a["started"] for a in answers)
        self.seconds.append(max(a["ended"] for a in answers) - started)
        for name in dict.fromkeys(n for a in answers for n in a["marks"]):
            end = max(a["marks"][name] for a in answers if name in a["marks"])
            self.stages.setdefault(name, []).append(end - at)
            at = end
        received = [sum(r for _, r in a["links"]) for a in answers]
        self.bytes_total, self.bytes_received = sum(received), received[senders:]
        if self.method in ("dense-direct", "ours") and self.bytes_total != sum(
            s for a in answers for s, _ in a["links"]
        ):
            raise ProofError(f"{self.method}: not as many bytes arrived as were sent.")
        stages = max(len(a["links"]) for a in answers)
        self.link_bytes = sum(max(max(a["links"][n]) for a in answers if n < len(a["links"])) for n in range(stages))
        self.messages = max(a["messages"] for a in answers)


def run_p2p(options: Options, *, json_output: bool) -> None:
    """Measure and print."""
    shapes, old, new, what = _state(options)
    case = make_case(shapes, options.senders, options.receivers)
    pieces = [n for n in PIECES if n <= case.numel // 64]
    default = int(Settings.model_fields["p2p_bucket_bytes"].default)
    contenders = [Measured(m, default, MODEL) for m in METHODS]
    contenders += [Measured("ours", b, MODEL) for b in BUCKETS if b != default]
    contenders += [Measured("ours", default, str(n)) for n in pieces]
    install: dict[str, list[float]] = {"prepare": [], "commit": []}
    with tempfile.TemporaryDirectory(prefix="dte-bench-") as folder:
        digests = _write(Path(folder), case, old, new, pieces)
        changed = int((old != new).sum())
        del old, new
        say(f"{case.numel:,} parameters, {changed:,} changed; {options.senders} + {options.receivers} processes")
        with Members(Path(folder), options.senders, options.receivers) as members:
            operations = members.connect()
            for number in range(options.rounds + 1):
                _round(members, contenders, install, case, digests, number)
                say(f"round {number} of {options.rounds}" + (" (warm-up)" if number == 0 else ""))
    result = _result(options, what, case, changed, contenders, install, operations)
    _print(result)
    if json_output:
        print(json.dumps(result))


def _state(options: Options) -> tuple[Shapes, U16, U16, str]:
    """Tensors, bits before and after, and where they are from."""
    if options.record is None:
        shapes = llama(options.parameters or PARAMETERS)
        changed = CHANGED if options.changed is None else options.changed
        say("making a model")
        return shapes, *synthetic(shapes, changed, options.seed), "synthetic"
    if options.parameters is not None or options.changed is not None:
        raise InvalidInput(
            "a record has its own parameters and changes.", remedy="Leave out --parameters and --changed, or --record."
        )
    import torch

    record = recording(options.record)
    new = np.empty(record.numel, np.uint16)
    for t in record.tensors:
        at = slice(t.start, t.start + t.numel)
        new[at] = round_to_bf16_bits(torch.from_numpy(np.array(record.theta[at])))
    return [(t.name, t.shape) for t in record.tensors], np.array(record.prev_bits), new, "record"


def _write(folder: Path, case: Case, old: U16, new: U16, pieces: Sequence[int]) -> dict[str, list[str]]:
    """What the members read; the digests before and after by tensor."""
    digests = {}
    for meta in case.metas:
        start, key = case.starts[meta.name], DigestKey.for_tensor(meta.name)
        at = slice(start, start + meta.shape[0] * row_major(meta.shape)[0])
        digests[meta.name] = [to_hex(digest_array(key, np.ascontiguousarray(bits[at]))) for bits in (old, new)]
    old.tofile(folder / "old")
    new.tofile(folder / "new")
    given = {
        "tensors": [(m.name, m.shape) for m in case.metas],
        "digests": digests,
        "pieces": list(pieces),
        "message_bytes": MESSAGE_BYTES,
    }
    (folder / "case.json").write_text(json.dumps(given))
    return digests


def _round(
    members: Members,
    contenders: Sequence[Measured],
    install: dict[str, list[float]],
    case: Case,
    digests: Mapping[str, Sequence[str]],
    number: int,
) -> None:
    """Every contender once, each from another place in the order than in the round before. Round 0 counts for nothing:
    it compiles and connects."""
    at = number % len(contenders)
    for c in [*contenders[at:], *contenders[:at]]:
        answers = members.ask("transfer", method=c.method, bucket_bytes=c.bucket_bytes, pieces=c.pieces)
        members.ask("check", method=c.method, pieces=c.pieces)
        if number:
            c.add(answers, members.senders)
        if c is contenders[len(METHODS) - 1]:
            prepared = members.ask("prepare")[members.senders :]
            _proven(case, digests, prepared)
            committed = members.ask("commit")[members.senders :]
            members.ask("reset")
            for name, phase in (("prepare", prepared), ("commit", committed)) if number else ():
                install[name].append(max(a["ended"] for a in phase) - min(a["started"] for a in phase))


def _proven(case: Case, digests: Mapping[str, Sequence[str]], verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Compare the digests of tensors that the receivers hold in parts, as whoever drives ranks does between the phases;
    those of whole tensors were compared on each rank."""
    parts: dict[str, list[int]] = {}
    numel = {m.name: int(np.prod(m.shape)) for m in case.metas}
    for rank, mine in enumerate(case.receivers):
        for held in mine:
            if held.lanes < numel[held.tensor]:
                parts.setdefault(held.tensor, []).append(rank)
    for tensor, ranks in parts.items():
        found = [to_hex(add(*(from_hex(verdicts[r][side][tensor]) for r in ranks))) for side in ("live", "after")]
        if found != list(digests[tensor]):
            raise ProofError(f"the receivers' digests of {tensor} do not add up to the version's.")


def _times(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _result(
    options: Options,
    what: str,
    case: Case,
    changed: int,
    contenders: Sequence[Measured],
    install: Mapping[str, Sequence[float]],
    operations: Mapping[str, int],
) -> dict[str, Any]:
    ours = contenders[len(METHODS) - 1]

    def of(c: Measured) -> dict[str, Any]:
        median = statistics.median(c.seconds)
        return {
            "seconds": _times(c.seconds),
            "stages": {name: statistics.median(s) for name, s in c.stages.items()},
            "bytes": c.bytes_total,
            "bytes_per_receiver": c.bytes_received,
            "seconds_at_1_gbit": c.link_bytes / GIGABIT,
            "times_ours": {
                "seconds": median / statistics.median(ours.seconds),
                "bytes": c.bytes_total / ours.bytes_total,
                "seconds_at_1_gbit": c.link_bytes / ours.link_bytes,
            },
        }

    def row(c: Measured) -> dict[str, Any]:
        return {"seconds": _times(c.seconds), "messages": c.messages, "bytes": c.bytes_total}

    buckets = sorted((c for c in contenders if c.method == "ours" and c.pieces == MODEL), key=lambda c: c.bucket_bytes)
    return {
        "bench": "p2p",
        "state": what,
        "seed": options.seed if what == "synthetic" else None,
        "parameters": case.numel,
        "changed": changed,
        "changed_fraction": changed / case.numel,
        "senders": options.senders,
        "receivers": options.receivers,
        "rounds": options.rounds,
        "operations": operations[MODEL],
        "bucket_bytes": ours.bucket_bytes,
        "bit_exact": True,  # anything else has ended the run
        "methods": {c.method: of(c) for c in contenders[: len(METHODS)]},
        "install": {name: _times(s) for name, s in install.items()}
        | {"both": _times([a + b for a, b in zip(install["prepare"], install["commit"], strict=True)])},
        "by_bucket": [{"bucket_bytes": c.bucket_bytes, **row(c)} for c in buckets],
        "by_operations": [{"operations": operations[c.pieces], **row(c)} for c in contenders if c.pieces != MODEL],
    }


def _span(times: Mapping[str, float]) -> tuple[str, str]:
    return f"{times['median']:.3f}", f"{times['min']:.3f}..{times['max']:.3f}"


def _print(result: Mapping[str, Any]) -> None:
    def methods() -> Iterator[tuple[str, ...]]:
        for name, m in result["methods"].items():
            t = m["times_ours"]
            yield (
                name, *_span(m["seconds"]), f"{t['seconds']:.1f}", human_bytes(m["bytes"]),
                human_bytes(max(m["bytes_per_receiver"])), f"{t['bytes']:.1f}", f"{m['seconds_at_1_gbit']:.3f}",
                ", ".join(f"{stage} {s:.3f}" for stage, s in m["stages"].items()) if len(m["stages"]) > 1 else "",
            )  # fmt: skip

    print_table(
        ("what", "seconds", "min..max", "× ours", "bytes", "a receiver", "× ours", "at 1 Gbit/s", "stages"),
        methods(),
        title=f"{result['parameters']:,} parameters ({result['state']}), {result['changed']:,} changed "
        f"({result['changed_fraction']:.2%}), {result['senders']} senders, {result['receivers']} receivers, "
        f"{result['operations']} operations, medians of {result['rounds']}; all arrived bit-exact",
    )
    print_table(
        ("then, on the receivers", "seconds", "min..max"),
        [(name, *_span(result["install"][name])) for name in ("prepare", "commit", "both")],
    )
    print_table(
        ("ours, by bucket", "seconds", "min..max", "messages of a pair"),
        [(human_bytes(b["bucket_bytes"]), *_span(b["seconds"]), str(b["messages"])) for b in result["by_bucket"]],
    )
    print_table(
        ("ours, by operations", "seconds", "min..max", "bytes"),
        [(f"{o['operations']:,}", *_span(o["seconds"]), human_bytes(o["bytes"])) for o in result["by_operations"]],
    )
    print(
        "All processes share this machine's cores and memory, and no network is between them: bytes are what a network "
        "would carry,\nseconds are not what it would take. At 1 Gbit/s: the bytes of the busiest member's link, stage "
        "after stage, a broadcast sent once."
    )
