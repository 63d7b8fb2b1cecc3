"""kill -9 of every process at chosen moments, and whatever it takes to start it again. Nothing is lost or mixed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from engine.records import CommitDecision
from tests.faults.cluster import RUN, Cluster
from tests.support.store_proxy import Hold

pytestmark = pytest.mark.faults


def finish(cluster: Cluster, decided: int | None = None) -> None:
    """Train on for two versions; everything must be in order, and number `decided` must be a commit."""
    cluster.clear_holds()
    cluster.settle()
    version, _ = cluster.settle()
    decisions = cluster.check(version)
    if decided is not None:
        assert isinstance(decisions[decided], CommitDecision), decisions[decided]
    head = decisions[version]
    assert isinstance(head, CommitDecision)
    assert head.totals.dense_tiles == 0, "the second version after a fault is sparse again"
    cluster.healthy = True


# What the killed trainer daemon was doing: the request of its own that is held when it dies.
MOMENTS = {
    "before-a-chunk": ("PUT", r"/chunks/", False),
    "chunk-stored-not-acknowledged": ("PUT", r"/chunks/", True),
    "before-its-part": ("PUT", r"/parts/", False),
    "part-stored-not-acknowledged": ("PUT", r"/parts/", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_trainer_daemon_dies_while_it_publishes(cluster: Cluster, moment: str) -> None:
    number = list(MOMENTS).index(moment) % 3
    method, path, after = MOMENTS[moment]
    hold = cluster.hold(method, path, at=[number], after=after)
    version = cluster.publish_step()
    hold.wait()
    cluster.kill_daemon(number)
    hold.lose()
    # The trainer goes on without its daemon; what it does then is not lost either.
    cluster.train(2)
    if moment != "part-stored-not-acknowledged":
        assert cluster.decision(version) is None
    cluster.restart_daemon(number)
    cluster.until("the version that was in flight is decided", lambda: cluster.decision(version))
    finish(cluster, decided=version)


@pytest.mark.parametrize("after", [False, True], ids=["before", "not-acknowledged"])
def test_the_daemon_that_decides_dies(cluster: Cluster, after: bool) -> None:
    hold = cluster.hold_decision(after=after)
    version = cluster.publish_step()
    hold.wait()
    cluster.kill_daemon(cluster.number_of(hold.who))
    # The others decide without it. Its own request, if it comes at all, comes late.
    cluster.until("somebody else decides", lambda: cluster.decision(version))
    standing = cluster.decision(version)
    hold.release()
    assert hold.done.wait(60)
    assert cluster.decision(version) == standing
    cluster.restart_daemon(cluster.number_of(hold.who))
    finish(cluster, decided=version)


def test_a_trainer_daemon_dies_while_it_reads(cluster: Cluster) -> None:
    """The worker stands still in the middle of the read, so the trainer is held; the daemon's death lets it go."""
    (worker,) = cluster.daemons[1].workers()
    os.kill(worker, signal.SIGSTOP)
    version = cluster.publish_step()
    cluster.kill_daemon(1)
    cluster.train(2)
    cluster.restart_daemon(1)
    cluster.settle()
    assert cluster.decision(version) is not None
    finish(cluster)


def test_a_trainer_daemon_dies_between_versions(cluster: Cluster) -> None:
    cluster.settle()
    for number in (0, 1, 2):
        cluster.kill_daemon(number)
    cluster.restart_all()
    # Nothing was in flight and no step unread: not even a dense tile.
    version, _ = cluster.settle()
    head = cluster.check(version)[version]
    assert isinstance(head, CommitDecision)
    assert head.totals.dense_tiles == 0
    finish(cluster)


def test_all_trainer_daemons_die_at_once(cluster: Cluster) -> None:
    hold = cluster.hold("PUT", r"/parts/", every=True)
    version = cluster.publish_step()
    hold.wait()
    for number in cluster.daemons:
        cluster.kill_daemon(number)
    hold.lose()
    cluster.clear_holds()
    cluster.train(1)
    cluster.restart_all()
    finish(cluster, decided=version)


def _held_at(path: str) -> Callable[[Cluster], int]:
    def reach(cluster: Cluster) -> int:
        hold = cluster.hold("PUT", path, at=[1])
        version = cluster.publish_step()
        hold.wait()
        return version

    return reach


def _reading(cluster: Cluster) -> int:
    (worker,) = cluster.daemons[1].workers()
    os.kill(worker, signal.SIGSTOP)
    version = cluster.publish_step()
    return version


@pytest.mark.parametrize("reach", [_reading, _held_at("/chunks/")], ids=["reading", "uploading"])
def test_a_worker_dies(cluster: Cluster, reach: Callable[[Cluster], int]) -> None:
    version = reach(cluster)
    (worker,) = cluster.daemons[1].workers()
    os.kill(worker, signal.SIGKILL)
    cluster.clear_holds()
    cluster.until("the version is decided", lambda: cluster.decision(version))
    finish(cluster, decided=version)


@pytest.mark.parametrize("path", ["/chunks/", r"/decision\.json"])
def test_the_store_dies(cluster: Cluster, path: str) -> None:
    hold = cluster.hold("PUT", path, every=True)
    version = cluster.publish_step()
    hold.wait()
    cluster.store.kill()
    cluster.clear_holds()
    # The store is away: training goes on and every step is read, but nothing is published.
    for answer in cluster.train(3):
        assert all(s["version"] is None and s["job"] is not None for s in answer["syncs"])
    cluster.start_store()
    cluster.until("the version in flight is decided", lambda: cluster.decision(version))
    following, _ = cluster.settle()
    commit = cluster.check(following)[following]
    assert isinstance(commit, CommitDecision)
    assert commit.totals.dense_tiles == 0
    finish(cluster, decided=version)


@pytest.mark.parametrize(("method", "path"), [("GET", r"/decision\.json"), ("GET", "/chunks/")])
def test_the_rollout_daemon_dies(cluster: Cluster, method: str, path: str) -> None:
    hold = Hold(method, path, every=True)
    cluster.rollout_proxy.add(hold)
    cluster.settle()
    hold.wait()
    cluster.rollout.kill()
    hold.lose()
    cluster.clear_holds()
    cluster.settle()
    cluster.start_rollout()
    finish(cluster)


def test_the_receiver_dies_in_the_middle_of_an_install(cluster: Cluster) -> None:
    def state() -> str:
        (info,) = cluster.get("rollout", f"/receivers?run={RUN}").json()
        return str(info["state"])

    hold = Hold("GET", "/chunks/", every=True)
    cluster.rollout_proxy.add(hold)
    cluster.settle()
    # The daemon is on its way to the version, and lacks a chunk of it; from here its next word is `prepare`.
    cluster.until("the receiver is behind", lambda: state() == "behind")
    cluster.receiver.stop()
    cluster.clear_holds()
    cluster.until("the daemon installs", lambda: state() == "installing")
    cluster.receiver.kill()
    cluster.settle()
    cluster.start_receiver()
    finish(cluster)


def test_the_receiver_dies_between_versions(cluster: Cluster) -> None:
    version, _ = cluster.settle()
    cluster.check(version)
    cluster.receiver.kill()
    cluster.settle()
    cluster.start_receiver()
    finish(cluster)


@pytest.mark.parametrize("moment", ["between", "reading", "complete"])
def test_a_trainer_rank_dies(cluster: Cluster, moment: str) -> None:
    """And with it the job; the new launch goes on from the checkpoint of the last step."""
    cluster.settle()
    version = -1
    hold = None
    if moment == "reading":
        version = _reading(cluster)
    elif moment == "complete":
        hold = cluster.hold_decision(every=True)
        version = cluster.publish_step()
        hold.wait()
    saved = cluster.trainers[0].log.parent / "checkpoints" / cluster.launches[-1][0]
    newest = max(int(p.name) for p in saved.iterdir() if len(list(p.glob("*.npz"))) == 3)
    cluster.trainers[1].kill()
    cluster.end_trainers()
    if moment == "reading":
        (worker,) = cluster.daemons[1].workers()
        os.kill(worker, signal.SIGCONT)
    cluster.clear_holds()
    opened = cluster.launch(3, checkpoint=str(saved / str(newest)))
    decisions = cluster.check(cluster.settle()[0])
    starts = [d for d in decisions.values() if d.kind == "epoch-start"]
    assert starts[-1].epoch == opened["epoch"]
    if moment == "complete":
        # All parts were there: decided by whoever came first, under the epoch that made them.
        assert isinstance(decisions[version], CommitDecision)
        assert decisions[version].epoch == opened["epoch"] - 1
    finish(cluster)
