"""New lives of the trainer job: zombies of an older one, resumed weights, other world sizes, adopted versions."""

from __future__ import annotations

import pytest

from clients.protocol import JobState
from engine.records import CommitDecision, Decision, EpochStartDecision
from tests.faults.cluster import RUN, Cluster

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def epoch_start(decisions: dict[int, Decision], epoch: int) -> EpochStartDecision:
    (found,) = [d for d in decisions.values() if isinstance(d, EpochStartDecision) and d.epoch == epoch]
    return found


def first_commit(decisions: dict[int, Decision], epoch: int) -> CommitDecision:
    return next(d for _, d in sorted(decisions.items()) if isinstance(d, CommitDecision) and d.epoch == epoch)


def refusal(cluster: Cluster, number: int) -> str:
    """Why a daemon gives rank `number` of a launch no next version; empty if it does."""
    answer = cluster.get(f"daemon{number}", f"/ranks/{number}/cut?run={RUN}")
    return str(answer.json()["detail"]) if answer.status_code == 409 else ""


@pytest.mark.parametrize("path", ["/parts/", r"/decision\.json"], ids=["before-its-part", "before-a-decision"])
def test_a_zombie_daemon_of_an_old_epoch(cluster: Cluster, path: str) -> None:
    """It stands still in the middle of a publication while the job is started again elsewhere, and wakes up."""
    cluster.settle()
    hold = cluster.hold("PUT", path)
    version = cluster.publish_step()
    hold.wait()
    job_id = cluster.jobs[cluster.number_of(hold.who)]
    saved = cluster.checkpoint()
    zombie = cluster.number_of(hold.who)
    cluster.daemons[zombie].stop()
    # Its trainer ranks are zombies too: they stand still and live.
    old = cluster.trainers
    for trainer in old:
        trainer.stop()
    if path == "/parts/":
        cluster.until("the others' parts", lambda: len(cluster.part_writers(version)) == 2)
    else:
        cluster.until("somebody else decides", lambda: cluster.decision(version))
    cluster.start_daemon(3)
    opened = cluster.launch(3, checkpoint=saved, at=[3 if n == zombie else n for n in range(3)])
    new_version, _ = cluster.settle()
    before = cluster.check(new_version)
    # What the zombie had begun ended without it: not at all, or whole.
    assert isinstance(before[version], EpochStartDecision if path == "/parts/" else CommitDecision)
    assert epoch_start(before, opened["epoch"])
    standing = {n: cluster.decision(n) for n in before}

    hold.release()
    cluster.daemons[zombie].go_on()
    assert hold.done.wait(60)
    newer = f"a newer epoch ({opened['epoch']}) is open"
    cluster.until("the zombie says that it is superseded", lambda: newer in refusal(cluster, zombie))
    job = cluster.until("its job ends", lambda: cluster.final_job(zombie, job_id))
    if path == "/parts/":
        assert job.state is JobState.ABORTED
        assert "superseded" in job.problem.detail
    else:
        assert (job.state, job.version) == (JobState.COMMITTED, version)
    for trainer in old:
        trainer.go_on()
        trainer.send("train", steps=1)
    for number, trainer in enumerate(old):
        answer = trainer.receive()
        assert not answer["ok"]
        assert answer["error"] in ("StateConflict", "Conflict"), answer
        assert number != zombie or newer in answer["text"]
        assert answer["remedy"]
        trainer.end()
    cluster.settle()
    last, _ = cluster.settle()
    after = cluster.check(last)
    # It wrote no decision: all that was there is as it was, all that is new is of the new epoch.
    assert {n: cluster.decision(n) for n in before} == standing
    assert {d.epoch for n, d in after.items() if n not in before} == {opened["epoch"]}

    cluster.end_trainers()
    cluster.daemons.pop(3).kill()
    cluster.launch(3, checkpoint=saved)
    cluster.check(cluster.settle()[0])
    cluster.healthy = True


def test_resumed_trainers(cluster: Cluster) -> None:
    """The same weights, older ones, and other world sizes, one after the other; the receiver lives through it all."""
    pid = cluster.receiver.pid
    cluster.check(cluster.settle()[0])
    (before,) = cluster.get("rollout", f"/receivers?run={RUN}").json()
    old = cluster.checkpoint()
    cluster.settle()
    saved = cluster.checkpoint()
    # The same weights, on two ranks: nothing differs, so the next version is a delta.
    cluster.end_trainers()
    opened = cluster.launch(2, checkpoint=saved)
    version, _ = cluster.settle()
    decisions = cluster.check(version)
    assert epoch_start(decisions, opened["epoch"]).differs == []
    first = first_commit(decisions, opened["epoch"])
    assert (first.rewound, first.totals.dense_tiles) == (False, 0)
    # Older weights, on one rank: the first version is dense, on top of the head, and says its step.
    cluster.end_trainers()
    opened = cluster.launch(1, checkpoint=old)
    version, _ = cluster.settle()
    decisions = cluster.check(version)
    assert epoch_start(decisions, opened["epoch"]).differs
    first = first_commit(decisions, opened["epoch"])
    assert first.rewound
    assert first.totals.dense_tiles > 0
    assert first.step == int(old.rsplit("/", 1)[1])
    assert first.base is not None
    # Other weights altogether, on three ranks again.
    cluster.end_trainers()
    opened = cluster.launch(3, seed=99)
    version, _ = cluster.settle()
    first = first_commit(cluster.check(version), opened["epoch"])
    assert first.rewound
    version, _ = cluster.settle()
    head = cluster.check(version)[version]
    assert isinstance(head, CommitDecision)
    assert head.totals.dense_tiles == 0
    # It followed without a restart and without a resync.
    (info,) = cluster.get("rollout", f"/receivers?run={RUN}").json()
    assert info["resyncs"] == before["resyncs"]
    assert cluster.receiver.pid == pid
    cluster.healthy = True


def test_a_complete_undecided_version_is_adopted(cluster: Cluster) -> None:
    """Everybody died between the last part and the decision; daemons that know nothing open the next epoch."""
    cluster.settle()
    hold = cluster.hold_decision(every=True)
    version = cluster.publish_step()
    hold.wait()
    saved = cluster.checkpoint()
    cluster.end_trainers()
    for number in range(3):
        cluster.kill_daemon(number)
        cluster.wipe(number)
    hold.lose()
    cluster.clear_holds()
    assert cluster.decision(version) is None
    assert len(cluster.part_writers(version)) == 3
    for number in range(3):
        cluster.start_daemon(number, roles="publisher")
    opened = cluster.launch(3, checkpoint=saved)
    head, _ = cluster.settle()
    decisions = cluster.check(head)
    adopted, start = decisions[version], decisions[version + 1]
    assert isinstance(adopted, CommitDecision)
    assert adopted.epoch == opened["epoch"] - 1
    assert isinstance(start, EpochStartDecision)
    assert (start.epoch, start.base, start.differs) == (opened["epoch"], version, [])
    for number in range(3):
        cluster.kill_daemon(number)
    cluster.restart_all()
    cluster.settle()
    cluster.healthy = True


def test_an_incomplete_version_is_fenced_off(cluster: Cluster) -> None:
    """Two of three parts are there when the job is started again; the third comes too late for ever."""
    cluster.settle()
    hold = cluster.hold("PUT", "/parts/", at=[2])
    version = cluster.publish_step()
    hold.wait()
    cluster.until("two parts", lambda: len(cluster.part_writers(version)) == 2)
    saved = cluster.checkpoint()
    cluster.end_trainers()
    # With its spool it would send the part again by itself and the version would be whole; so it has lost it.
    cluster.kill_daemon(2)
    cluster.wipe(2)
    cluster.start_daemon(2)
    opened = cluster.launch(3, checkpoint=saved)
    cluster.settle()
    hold.release()
    assert hold.done.wait(60)
    cluster.settle()
    head, _ = cluster.settle()
    decisions = cluster.check(head)
    assert isinstance(decisions[version], EpochStartDecision)
    assert decisions[version].epoch == opened["epoch"]
    assert first_commit(decisions, opened["epoch"]).rewound
    cluster.healthy = True


@pytest.mark.parametrize(
    ("path", "after"),
    [("/launches/", True), ("/epochs/", False), (r"/decision\.json", True)],
    ids=["announced-not-acknowledged", "before-claiming", "opened-not-acknowledged"],
)
def test_a_daemon_dies_while_the_epoch_opens(cluster: Cluster, path: str, after: bool) -> None:
    """The trainers wait for it; it goes on where it was. There is one epoch, and one number is spent on it."""
    cluster.settle()
    saved = cluster.checkpoint()
    cluster.end_trainers()
    hold = cluster.hold("PUT", path, after=after)
    cluster.trainers = cluster.begin_launch(3, checkpoint=saved, on_daemon_down="wait")
    hold.wait()
    number = cluster.number_of(hold.who)
    cluster.kill_daemon(number)
    hold.lose()
    cluster.restart_daemon(number)
    opened = cluster.registered()
    version, _ = cluster.settle()
    decisions = cluster.check(version)
    start = epoch_start(decisions, opened["epoch"])
    assert start.differs == []
    assert first_commit(decisions, opened["epoch"]).totals.dense_tiles == 0
    cluster.healthy = True
