"""Nothing fails, but something takes very long: parts, decisions, acknowledgements."""

from __future__ import annotations

import pytest

from engine.records import CommitDecision
from tests.faults.cluster import Cluster

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("path", ["/chunks/", "/parts/"])
def test_one_writer_is_very_late(cluster: Cluster, path: str) -> None:
    """The others wait with their parts while training goes on for many steps; no timeout aborts."""
    cluster.settle()
    hold = cluster.hold("PUT", path, at=[2], every=True)
    version = cluster.publish_step()
    hold.wait()
    cluster.until("the others' parts", lambda: len(cluster.part_writers(version)) == 2)
    for answer in cluster.train(25):
        assert all(s["version"] is None for s in answer["syncs"])
        assert all(s["job"] is not None for s in answer["syncs"])
    assert cluster.decision(version) is None
    cluster.clear_holds()
    cluster.until("the decision", lambda: cluster.decision(version))
    head, _ = cluster.settle()
    decisions = cluster.check(head)
    late, following = decisions[version], decisions[version + 1]
    assert isinstance(late, CommitDecision)
    # Every step in between was read: what the next version carries is sparse.
    assert isinstance(following, CommitDecision)
    assert following.totals.dense_tiles == 0
    assert following.step > late.step + 25
    cluster.healthy = True


@pytest.mark.parametrize("lost", [False, True], ids=["arrives-late", "never-arrives"])
def test_a_stalled_coordinator_wakes_up(cluster: Cluster, lost: bool) -> None:
    """It stands still just before its decision is written; others decide, and go on by two versions; it wakes up."""
    cluster.settle()
    hold = cluster.hold_decision()
    version = cluster.publish_step()
    hold.wait()
    stalled = cluster.number_of(hold.who)
    cluster.daemons[stalled].stop()
    standing = cluster.until("somebody else decides", lambda: cluster.decision(version))
    if lost:
        hold.lose()
    else:
        hold.release()
        assert hold.done.wait(60)
    assert cluster.decision(version) == standing
    cluster.daemons[stalled].go_on()
    cluster.clear_holds()
    cluster.settle()
    head, _ = cluster.settle()
    decisions = cluster.check(head)
    assert cluster.decision(version) == standing
    assert isinstance(decisions[version], CommitDecision)
    assert cluster.get(f"daemon{stalled}", "/readyz").status_code == 200
    cluster.healthy = True
