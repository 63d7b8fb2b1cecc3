"""Real FSDP2 training over Gloo, real daemons and a real receiver: what arrives is what a dense gather would give."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fsdp.rig import Job, Rig

pytestmark = pytest.mark.slow

EXTRAS = {
    "extras.few": "certified",
    "extras.sideways": "certified",
    "extras.frozen": "frozen",
    "extras.loose": "certified",
    "extras.low.weight": "snapshot",
    "extras.bias": "snapshot",
}


def trained(job: Job) -> list[list[str]]:
    """A course of training with all that may happen: what each rank holds after each part of it."""
    held: list[list[str]] = [[] for _ in job.ranks]
    for op, values in (
        ("train", {"steps": 2}),
        ("keep", {}),
        ("train", {"steps": 2}),
        ("back", {}),
        ("train", {"steps": 1}),
        ("train", {"skip": True}),
        ("train", {"steps": 1}),
    ):
        for mine, answer in zip(held, job.ask(op, **values), strict=True):
            mine += [s["digest"] for s in answer["steps"]] if "steps" in answer else [answer["digest"]]
    return held


def test_training_is_the_same_with_and_without_a_source(rig: Rig) -> None:
    """Mixed precision, gradient accumulation, a schedule, a parameter without gradient, state loaded in between."""
    spec = {"bf16": True}
    with rig.job(2, spec=spec) as job:
        plain = trained(job)
    with rig.job(2, spec=spec) as job:
        said = job.register("same")
        assert trained(job) == plain
        for answer, shared, stats in zip(said, job.ask("shared"), job.ask("stats"), strict=True):
            certified = [n for n, d in answer["detectors"].items() if d == "certified"]
            assert set(shared["parameters"]) >= answer["detectors"].keys() - {"extras.bias"}
            assert set(shared["moments"]) >= {f"{n}.{m}" for n in certified for m in ("exp_avg", "exp_avg_sq")}
            # What was loaded is in shared memory again; the state of the plain parameter is loaded as it is.
            assert stats["moved"] >= len(set(certified) - {"extras.loose"})
            assert stats["revoked"] == stats["down"] == 0
    assert len({tuple(held) for held in plain}) == 2  # ranks hold different things, so the comparison says something


def test_every_version_arrives_bit_for_bit(rig: Rig) -> None:
    """Two ranks at two daemons: odd sizes, extras, skipped steps, accumulated ones, a second registration."""
    spec: dict[str, Any] = {"kind": "llama"}
    with rig.job(2, spec=spec) as job, rig.control("two") as control:
        proofs = control.versions().degraded.get("proof-failed", 0)
        first, second = job.register("two")
        extras = [{n: d for n, d in a["detectors"].items() if n.startswith("extras")} for a in (first, second)]
        assert extras[0] | extras[1] == EXTRAS
        # What is not sharded is published by one rank; of the rest each has its part.
        assert extras[0].keys() & extras[1].keys() == EXTRAS.keys() - {"extras.loose", "extras.bias"}
        embed = "lm.model.embed_tokens.weight"
        assert (first["numel"][embed], second["numel"][embed]) == (126 * 30, 125 * 30)
        assert (first["numel"]["extras.few"], second["numel"]["extras.few"]) == (2, 1)
        with rig.follow("two", spec):
            job.publish(2)
            job.publish(skip=True)  # only the buffer moved
            states = {s["state"] for a in job.ask("train", publish=False) for s in a["steps"]}
            assert states == {"accumulated"}
            job.publish()
            job.ask("write_frozen")
            job.publish()
            # The same weights again under a new registration: deltas go on.
            job.ask("close")
            job.register("two")
            last = job.publish(2)[0]["version"]
            info = control.version(last)
            assert (info.rewound, info.writers) == (False, 2)
            assert 0 < info.changed < info.elements / 4
            assert control.versions().degraded.get("proof-failed", 0) == proofs  # every delta so far was the whole one
            # Weights that no step explains: loaded in the middle.
            job.ask("keep")
            job.publish()
            job.ask("back")
            job.publish(2)


def test_four_ranks_then_two_then_other_weights_on_two_replicas(rig: Rig) -> None:
    """An elastic job: the chain goes on where the weights do, and is rewound where they do not."""
    spec: dict[str, Any] = {"tied": True, "wrapped": True}
    checkpoint = str(rig.folder / "elastic-checkpoint")
    with rig.follow("elastic", spec):
        with rig.job(4, spec=spec) as job:
            said = job.register("elastic")
            assert all(a["aliases"] == {"lm.lm_head.weight": "lm.model.embed_tokens.weight"} for a in said)
            assert not any("wrapped" in n or "lm_head" in n for a in said for n in a["detectors"])
            few = [a["numel"].get("extras.few", 0) for a in said]
            assert few == [1, 1, 1, 0]  # the last rank holds padding only
            whole = _published(said)
            done = job.publish(3)
            job.ask("save", folder=checkpoint)
        with rig.job(2, spec=spec, seed=5, checkpoint=checkpoint) as job:
            job.register("elastic")
            resumed = job.publish(2)
        replicas = {**spec, "replicas": 2}
        with rig.job(4, spec=replicas, seed=6) as job:
            said = job.register("elastic")
            assert all(a["detectors"] for a in said)  # replicas share the work
            assert _published(said) == whole
            other = job.publish(2)
    with rig.control("elastic") as control:
        infos = control.versions().versions
        at = {v.version: v for v in infos}
        lives = [[v for v in infos if v.epoch == at[part[0]["version"]].epoch] for part in (done, resumed, other)]
        assert [[v.rewound for v in life] for life in lives] == [[False] * 4, [False] * 2, [True, False, False]]
        assert [life[-1].writers for life in lives] == [4, 2, 4]
        goes_on, rewound = lives[1][0], lives[2][0]
        assert (goes_on.base, goes_on.step) == (done[-1]["version"], 4)
        assert goes_on.changed < goes_on.elements / 4
        # Dense as few tiles go where deltas do: those of a few elements, which have all changed.
        assert (rewound.base, rewound.step) == (resumed[-1]["version"], 0)
        assert rewound.dense_tiles > 5 * goes_on.dense_tiles


def _published(said: list[dict[str, Any]]) -> Counter[str]:
    """Elements by parameter, of all ranks together."""
    return sum((Counter(a["numel"]) for a in said), Counter())


def test_a_rank_that_cannot_declare_stops_all(rig: Rig) -> None:
    """No rank waits for the registration of one that has refused."""
    with rig.job(2, spec={}) as job:
        job.ranks[1].ask("spoil")
        first, second = job.register("spoilt", ok=False)
        assert (first["error"], second["error"]) == ("InvalidInput", "UnsupportedOptimizer")
        assert "rank 1 cannot declare" in first["text"]
