"""Replicas of an HSDP mesh, and what FSDP does not shard: each version says which ranks have other bits than it has."""

from __future__ import annotations

import pytest

from tests.fsdp.rig import Job, Rig

pytestmark = pytest.mark.slow

NORM, LOOSE = "lm.model.norm.weight", "extras.loose"


def diverged(job: Job, rig: Rig) -> int:
    """Train until a step is a version (one accumulates while the last is undecided); how many replicas differ then."""
    for _ in range(100):
        (step,) = job.ask("train")[0]["steps"]
        if step["state"] == "committed":
            with rig.control(job.run) as control:
                return control.version(step["version"]).detail.get("diverged_replicas", 0)
        assert step["state"] == "accumulated", step
    raise AssertionError("no step became a version")


def test_a_replica_that_goes_astray_is_seen_until_it_is_brought_back(rig: Rig) -> None:
    with rig.job(2, spec={"replicas": 2}) as job:
        job.register("astray")
        assert diverged(job, rig) == 0
        held = job.ask("astray", name=NORM, rank=1)
        shares = [set(h["replicas"]) for h in held]
        assert {NORM, LOOSE, "extras.bias", "extras.frozen"} <= shares[0] | shares[1]
        assert not shares[0] & shares[1]
        assert all(shares), "one replica does all the publishing"
        assert diverged(job, rig) == 1
        job.ask("astray", name=LOOSE, rank=1)
        assert diverged(job, rig) == 2
        for name in (NORM, LOOSE):
            job.ask("astray", name=name, rank=None)
        assert diverged(job, rig) == 0


def test_ranks_compare_only_what_they_all_hold_and_only_if_that_is_wanted(rig: Rig) -> None:
    with rig.job(2, spec={}) as job:
        job.register("whole")
        held = job.ask("astray", name=LOOSE, rank=1)
        assert sorted(held[0]["replicas"] + held[1]["replicas"]) == ["extras.bias", LOOSE]
        assert diverged(job, rig) == 1
    with rig.job(2, spec={}) as job:
        job.register("silent", replica_digests=False)
        assert [h["replicas"] for h in job.ask("astray", name=LOOSE, rank=1)] == [[], []]
        assert diverged(job, rig) == 0
