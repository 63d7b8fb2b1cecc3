"""Is a sync one that this rank may be asked for now? Pure checks, each failure a problem with a remedy."""

from __future__ import annotations

from clients.protocol import RankRegistration, SliceSpec, SyncRequest
from engine.errors import InvalidInput

_SAME = "Send what the registration declared: one hyperparameter set per group, one step counter per slice."


def check_hypers(registration: RankRegistration, sync: SyncRequest) -> None:
    """InvalidInput unless lists have the registered lengths and the step can be undone (ηλ < 1)."""
    if len(sync.hypers) != len(registration.groups):
        raise InvalidInput(
            f"{len(sync.hypers)} hyperparameter sets for {len(registration.groups)} groups.", remedy=_SAME
        )
    if len(sync.steps) != len(registration.slices):
        raise InvalidInput(f"{len(sync.steps)} step counters for {len(registration.slices)} slices.", remedy=_SAME)
    if sync.scales and len(sync.scales) != len(registration.slices):
        raise InvalidInput(
            f"{len(sync.scales)} pairs of scales for {len(registration.slices)} slices.",
            remedy="Send one pair for each slice, or none.",
        )
    for number, hyper in enumerate(sync.hypers):
        decay = hyper.lr * hyper.weight_decay
        if not decay < 1.0:
            raise InvalidInput(
                f"group {number}: lr · weight_decay is {decay:g}; from 1 on the step cannot be undone.",
                remedy="Lower lr or weight_decay, or register these parameters with detector 'snapshot' or 'dense'.",
            )


def check_handles(registration: RankRegistration, sync: SyncRequest) -> RankRegistration:
    """The registration with moved memory references; InvalidInput unless only those moved."""
    if not sync.handles and not sync.replica_handles:
        return registration
    slices = _moved(registration.slices, sync.handles, "slice")
    replicas = _moved(registration.replicas, sync.replica_handles, "replica")
    return registration.model_copy(update={"slices": slices, "replicas": replicas})


def _moved(declared: list[SliceSpec], handles: list[SliceSpec], what: str) -> list[SliceSpec]:
    slices = list(declared)
    for spec in handles:
        if spec.slice >= len(slices):
            raise InvalidInput(f"{what} {spec.slice} was never registered.", remedy="Register the rank again.")
        old = slices[spec.slice]
        refs = ("theta", "exp_avg", "exp_avg_sq", "remainder")
        moved = old.model_copy(update={ref: getattr(spec, ref) for ref in refs})
        if moved != spec or (old.remainder is None) != (spec.remainder is None):
            raise InvalidInput(
                f"{what} {spec.slice} may only move; something else of its declaration changed.",
                remedy="Start a new launch to change what a rank owns.",
            )
        slices[spec.slice] = moved
    return slices
