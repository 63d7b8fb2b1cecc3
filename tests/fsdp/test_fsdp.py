"""Real FSDP2 training over Gloo, real daemons and a real receiver: what arrives is what a dense gather would give."""

from __future__ import annotations

from tests.fsdp.rig import Rig


def test_two_ranks(rig: Rig) -> None:
    with rig.job(2, spec={}) as job:
        job.register("two")
        with rig.follow("two", {}):
            job.publish(3)
