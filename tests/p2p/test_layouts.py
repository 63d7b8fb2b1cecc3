"""Versions arrive rank to rank, bit for bit, whatever the layouts of the two sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.p2p.rig import Job, Model, Ranks, Rect, p2p_daemon
from tests.support.command import dte

pytestmark = pytest.mark.p2p

DENSE: Model = {"embed": (64, 48), "q": (48, 48), "k": (16, 48), "up": (96, 48), "down": (48, 96), "norm": (48,)}


def whole(model: Model) -> list[Rect]:
    return [Rect(name) for name in model]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    running = p2p_daemon(tmp_path_factory.mktemp("p2p"))
    yield running.url
    running.end()


def rows(name: str, parts: int, rows: int) -> list[Rect]:
    """The matrix in `parts` bands of rows."""
    step = rows // parts
    return [Rect(name, k * step, (k + 1) * step) for k in range(parts)]


def columns(name: str, parts: int, columns: int) -> list[Rect]:
    step = columns // parts
    return [Rect(name, 0, None, k * step, (k + 1) * step) for k in range(parts)]


def tensor_parallel(parts: int, kv: int) -> Ranks:
    """As an engine holds it: q and up by rows, down by columns, `kv` different pieces of k, norms everywhere."""
    cut = {
        "embed": rows("embed", parts, 64),
        "q": rows("q", parts, 48),
        "up": rows("up", parts, 96),
        "down": columns("down", parts, 96),
    }
    k = rows("k", kv, 16)
    return [[*(cut[n][r] for n in cut), k[r * kv // parts], Rect("norm")] for r in range(parts)]


def sharded(parts: int) -> Ranks:
    """As a trainer's ranks own it: each element once, cut where no row ends."""
    out: list[list[Rect]] = [[] for _ in range(parts)]
    for name, shape in DENSE.items():
        n, m = (1, *shape)[-2:]
        for r in range(parts):
            if n >= parts:
                out[r].append(Rect(name, r * n // parts, (r + 1) * n // parts))
            else:
                out[r].append(Rect(name, 0, None, r * m // parts, (r + 1) * m // parts))
    return out


def crossed() -> Ranks:
    """TP2 x DP2 with a distributed optimizer: two bands of columns, each cut in two bands of rows."""
    out: list[list[Rect]] = []
    for c in range(2):
        for r in range(2):
            mine = []
            for name, shape in DENSE.items():
                n, m = (1, *shape)[-2:]
                half = Rect(name, 0, None, c * m // 2, (c + 1) * m // 2)
                if n > 1:
                    mine.append(Rect(name, r * n // 2, (r + 1) * n // 2, half.c0, half.c1))
                elif r == 0:
                    mine.append(half)
            out.append(mine)
    return out


WHOLE = [whole(DENSE)]
CASES: dict[str, tuple[Ranks, Ranks]] = {
    "1-1": (WHOLE, WHOLE),
    "2-1": (sharded(2), WHOLE),
    "1-2": (WHOLE, tensor_parallel(2, 2)),
    "2x2-2": (crossed(), tensor_parallel(2, 2)),
    "3-4-kv2": (sharded(3), tensor_parallel(4, 2)),
    "pp2-tp1": ([[Rect("embed"), Rect("q"), Rect("k")], [Rect("up"), Rect("down"), Rect("norm")]], WHOLE),
    "idle-rank": ([whole(DENSE), []], tensor_parallel(2, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_any_layout_on_either_side(case: str, url: str, tmp_path: Path) -> None:
    trainer, receiver = CASES[case]
    with Job(url, f"layout-{case}", DENSE, trainer, {"a": receiver}, tmp_path, seed=len(case)) as job:
        view = job.until_group(len(receiver))
        assert view["group"]["senders"] == len(trainer)
        # Nothing; one tensor only; all; several steps in one version.
        job.ship()
        job.step(without=[n for n in DENSE if n != "k"])
        assert job.ship() is not None
        assert job.info().path == "p2p"
        job.step()
        assert job.ship() is not None
        for _ in range(2):
            job.step()
            job.ship(publish=False)
        job.step(without=["embed", "down"])
        found = job.ship()
        assert found is not None
        assert (job.info().path, job.info().proof, job.info().resyncs) == ("p2p", "proven", 1)
        assert job.view()["last"] == found.version


def test_experts_from_two_ranks_to_two_halves_of_each(url: str, tmp_path: Path) -> None:
    """EP2 on the trainer's side, tensor parallel on the receiver's: every pair exchanges something."""
    model: Model = {f"e{n}.{part}": (32, 24) for n in range(4) for part in ("up", "down")} | {"router": (4, 24)}
    trainer = [[Rect(n) for n in model if n.startswith(("e0", "e1"))], [Rect(n) for n in model if n[1] in "23o"]]
    receiver = [
        [
            *(
                Rect(n, 16 * r, 16 * r + 16) if n.endswith("up") else Rect(n, 0, None, 12 * r, 12 * r + 12)
                for n in model
                if n != "router"
            ),
            Rect("router"),
        ]
        for r in range(2)
    ]
    with Job(url, "experts", model, trainer, {"a": receiver}, tmp_path) as job:
        job.until_group(2)
        for unused in ([], [n for n in model if n.startswith("e1")], [n for n in model if n.startswith("e2")]):
            job.step(without=unused)
            assert job.ship() is not None
            assert job.info().path == "p2p"


def test_a_tied_tensor_is_sent_once_and_written_twice(url: str, tmp_path: Path) -> None:
    model: Model = {"embed": (64, 48), "w": (48, 48)}
    with Job(url, "tied", model, [whole(model)], {"a": [whole(model)]}, tmp_path, tied={"embed": "head"}) as job:
        job.until_group(1)
        for _ in range(2):
            job.step()
            assert job.ship() is not None
        assert job.info().path == "p2p"
        assert len(job.holders["a"][0].held()) == 3


def test_receivers_of_every_transport_follow_one_run(url: str, tmp_path: Path) -> None:
    receivers = {"a": tensor_parallel(2, 2), "b": WHOLE, "c": WHOLE}
    how = {"a": "p2p", "b": "auto", "c": "store"}
    with Job(url, "mixed", DENSE, sharded(2), receivers, tmp_path, transport=how) as job:
        job.until_group(3)
        for _ in range(3):
            job.step()
            assert job.ship() is not None
        assert [job.info(n).path for n in "abc"] == ["p2p", "p2p", "store"]
        assert job.control.versions().degraded.get("p2p-missed", 0) == 0
        plan = json.loads(dte("plan", "--url", url, "--run", job.run, "--json").stdout)
        assert plan["elements"] == sum(
            h.numel() for n in "ab" for holder in job.holders[n] for h in holder.parameters()
        )
        assert 1 <= plan["balance"] < 1.2
        assert sum(p["bytes"] for p in plan["pairs"]) == sum(
            r["bytes"] for r in plan["exchange"].values() if r["pairs"]
        )
        shown = dte("plan", "--url", url, "--run", job.run, "--operations").stdout
        assert f"{plan['operations']} operations reach" in shown
        assert all(f"receiver:{job.run}-{n}" in shown for n in "ab")
        nobody = dte("plan", "--url", url, "--run", "nobody")
        assert (nobody.returncode, nobody.stdout) == (1, "")
        assert "no trainer ranks and no receiver ranks have joined" in nobody.stderr


def test_a_receiver_that_comes_later_joins_the_next_group(url: str, tmp_path: Path) -> None:
    with Job(url, "later", DENSE, sharded(2), {"a": WHOLE}, tmp_path) as job:
        first = job.until_group(1)["group"]["id"]
        job.step()
        assert job.ship() is not None
        job.receive(url, "b", tensor_parallel(2, 1), tmp_path)
        second = job.until_group(3)
        assert second["group"]["id"] != first
        assert not second["trouble"]
        for _ in range(2):
            job.step()
            assert job.ship() is not None
        assert {job.info(n).path for n in "ab"} == {"p2p"}


def test_dense_tiles_travel_too(url: str, tmp_path: Path) -> None:
    """Weights written outside the optimizer: their old bits are unknown, so their tiles go whole."""
    with Job(url, "dense", DENSE, sharded(2), {"a": tensor_parallel(2, 2)}, tmp_path) as job:
        job.until_group(2)
        job.step()
        for source, rank in zip(job.sources, job.ranks, strict=True):
            with torch.no_grad(), source.mutating():
                for p in rank.params:
                    p.mul_(1.5)
        found = job.ship()
        assert found is not None
        assert found.dense_tiles > 0
        assert job.info().path == "p2p"
        job.step()
        assert job.ship() is not None
