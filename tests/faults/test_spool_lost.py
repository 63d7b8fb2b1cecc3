"""A trainer daemon comes back without its data_dir while the trainer lives: the rank registers again, under its launch.

Nothing is lost: the epoch goes on, what the daemon had read is sent whole, and a number its part was promised for ends
as a commit if that part is in the store, else as an abort.
"""

from __future__ import annotations

import os
import shutil

import pytest

from engine.records import AbortDecision, CommitDecision
from tests.faults.cluster import Cluster

pytestmark = pytest.mark.faults


def lose(cluster: Cluster, number: int) -> None:
    cluster.kill_daemon(number)
    cluster.wipe(number)
    cluster.restart_daemon(number)


def after_all(cluster: Cluster) -> CommitDecision:
    """Two more versions; the second is sparse again, and no epoch was opened for that."""
    epoch = cluster.decision(cluster.next_number() - 1)["epoch"]  # type: ignore[index]
    cluster.settle()
    version, _ = cluster.settle()
    decisions = cluster.check(version)
    head = decisions[version]
    assert isinstance(head, CommitDecision)
    assert (head.epoch, head.totals.dense_tiles) == (epoch, 0)
    cluster.healthy = True
    return head


@pytest.fixture
def waiting(cluster: Cluster) -> Cluster:
    """Trainers that wait for their daemon sync the step at hand as soon as it knows them again, not the next one."""
    cluster.settle()
    saved = cluster.checkpoint()
    cluster.end_trainers()
    cluster.launch(3, checkpoint=saved, on_daemon_down="wait")
    cluster.settle()
    return cluster


def test_between_versions(waiting: Cluster) -> None:
    cluster = waiting
    lose(cluster, 1)
    version, _ = cluster.settle()
    commit = cluster.check(version)[version]
    assert isinstance(commit, CommitDecision)
    assert 0 < commit.totals.dense_lanes < commit.totals.elements, "only the lost rank's tiles are dense"
    assert not commit.rewound
    assert cluster.degraded(1)["spool-lost"] == 1
    after_all(cluster)


@pytest.mark.parametrize("delivered", [False, True], ids=["part-lost", "part-delivered"])
def test_with_a_version_in_flight(cluster: Cluster, delivered: bool) -> None:
    cluster.settle()
    # Rank 2 is late, so the number stays undecided while daemon 1 loses everything.
    late = cluster.hold("PUT", "/parts/", at=[2], every=True)
    lost = cluster.hold("PUT", "/chunks/", at=[1], every=True) if not delivered else None
    version = cluster.publish_step()
    late.wait()
    if lost is not None:
        lost.wait()
    cluster.until("the parts", lambda: len(cluster.part_writers(version)) == (2 if delivered else 1))
    cluster.kill_daemon(1)
    cluster.wipe(1)
    if lost is not None:
        lost.lose()
    cluster.proxy[1].clear()
    cluster.restart_daemon(1)
    if delivered:
        # It joins again while its old part may still be committed, and then it is.
        cluster.train(3)
        assert cluster.decision(version) is None
    cluster.clear_holds()
    cluster.settle()
    head = after_all(cluster)
    decision = cluster.check(head.version)[version]
    if delivered:
        assert isinstance(decision, CommitDecision)
    else:
        assert isinstance(decision, AbortDecision)
        assert decision.reason in ("revoked", "spool-lost")


def test_all_daemons_lose_everything(waiting: Cluster) -> None:
    cluster = waiting
    hold = cluster.hold("PUT", "/parts/", at=[2], every=True)
    cluster.publish_step()
    hold.wait()
    for number in range(3):
        cluster.kill_daemon(number)
        cluster.wipe(number)
    hold.lose()
    cluster.clear_holds()
    cluster.restart_all()
    after_all(cluster)


def test_the_folder_vanishes_under_a_running_daemon(cluster: Cluster) -> None:
    cluster.settle()
    # In one go: what the daemon is writing just then would be in the way of a removal file by file.
    os.rename(cluster.folder / "daemon0" / "spool", cluster.folder / "gone")
    shutil.rmtree(cluster.folder / "gone", ignore_errors=True)
    cluster.settle()
    cluster.settle()
    cluster.kill_daemon(0)
    cluster.restart_daemon(0)
    after_all(cluster)


def test_ranks_that_only_accumulate_join_again_too(cluster: Cluster) -> None:
    cluster.settle()
    lose(cluster, 0)
    answers = cluster.train(3, publish=False)
    assert answers[0]["syncs"][0]["job"] is None
    after_all(cluster)
