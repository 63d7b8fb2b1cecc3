"""What the daemon itself keeps of a rank in its spool: the registration with the newest handles, and the jobs.

One invariant: a sync is on disk before it is accepted, so a restarted daemon finishes it or says why it cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from app.worker.spool import RankSpool, write_atomic
from clients.protocol import Job, Model, RankRegistration, SyncRequest

log = logging.getLogger(__name__)

KEPT_JOBS = 32


class JobRecord(Model):
    """A job and, while it is not final, the request it answers."""

    job: Job
    sync: SyncRequest | None = None


class RankJobs(Model):
    """`jobs.json`. `epoch` is the rank's open epoch; `jobs` oldest first."""

    epoch: int | None = None
    jobs: list[JobRecord] = Field(default_factory=list)


def save_registration(spool: RankSpool, registration: RankRegistration) -> None:
    """Make the registration durable. SpoolFull if there is no room."""
    spool.create()
    write_atomic(spool.rank_file, registration.model_dump_json().encode())


def save_jobs(spool: RankSpool, jobs: RankJobs) -> None:
    """Make the jobs durable. SpoolFull if there is no room."""
    write_atomic(spool.jobs_file, jobs.model_dump_json().encode())


def load(spool: RankSpool) -> tuple[RankRegistration, RankJobs] | None:
    """What was saved; None, with a log line, if it cannot be used."""
    try:
        registration = RankRegistration.model_validate_json(spool.rank_file.read_bytes())
        jobs = RankJobs()
        if spool.jobs_file.exists():
            jobs = RankJobs.model_validate_json(spool.jobs_file.read_bytes())
    except (OSError, ValidationError) as error:
        log.error("the spool %s cannot be used: %s", spool.root, error)
        return None
    return registration, jobs


def found(spool_dir: Path) -> Iterator[RankSpool]:
    """Spools of earlier lives of the daemon, oldest registration first."""
    files = sorted(spool_dir.glob("*/*/*/rank.json"), key=lambda p: p.stat().st_mtime_ns)
    for path in files:
        yield RankSpool(path.parent)
