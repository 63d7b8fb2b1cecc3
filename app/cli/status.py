"""`dte status` and `dte versions`: what a daemon says about itself, as tables."""

from __future__ import annotations

from typing import Any

import httpx

from app.cli.output import human_bytes, human_ms, percent, print_json, print_table
from clients.control import ControlClient
from clients.errors import ApiError, error_for
from clients.http import Sender, one, read_answer, read_problem, unavailable
from clients.protocol import Model, ReceiverInfo, VersionInfo, Versions


class _Readiness(Model):
    ready: bool
    roles: dict[str, str | None]


def _readiness(url: str, token: str | None) -> _Readiness:
    sender = Sender(url, token=token)
    try:
        # 503 is an answer here, not a reason to try again, so this goes past the sender's retries.
        response = sender.client.get("/readyz", timeout=sender.options.timeout())
    except httpx.TransportError as e:
        raise unavailable(url, e) from e
    finally:
        sender.close()
    if response.status_code not in (200, 503):
        raise error_for(read_problem(response))
    return read_answer(httpx.Response(200, content=response.content, request=response.request), one(_Readiness))


def show_status(url: str, token: str | None, run: str | None, *, as_json: bool) -> int:
    """Print the daemon's state; returns the exit code (0 ready, 1 not)."""
    readiness = _readiness(url, token)
    versions: Versions | None = None
    receivers: list[ReceiverInfo] = []
    notes: list[str] = []
    with ControlClient(url, run=run, token=token) as control:
        # A daemon without the role, or without a run, answers with a problem: that is a note, not a failure.
        try:
            versions = control.versions(limit=1)
        except ApiError as e:
            notes.append(f"versions: {e.message}")
        try:
            receivers = control.receivers()
        except ApiError as e:
            notes.append(f"receivers: {e.message}")
    if as_json:
        print_json(
            {
                "ready": readiness.ready,
                "roles": readiness.roles,
                "versions": None if versions is None else _summary(versions),
                "receivers": [r.model_dump(mode="json") for r in receivers],
                "notes": notes,
            }
        )
        return 0 if readiness.ready else 1
    print_table(("role", "state"), [(name, reason or "ready") for name, reason in sorted(readiness.roles.items())])
    if versions is not None:
        head = "none" if versions.head is None else str(versions.head)
        print(f"\nrun {versions.run}: newest version {head}, epoch {versions.epoch}, next number {versions.next}")
        for name, count in sorted(versions.degraded.items()):
            print(f"degraded: {name} ({count} times)")
    if receivers:
        print()
        print_table(
            ("receiver", "kind", "ranks", "state", "installed", "lag", "proof", "resyncs", "last error"),
            [
                (
                    r.name,
                    r.kind,
                    str(r.ranks),
                    r.state.value,
                    "-" if r.installed is None else str(r.installed),
                    "-" if r.lag is None else str(r.lag),
                    r.proof,
                    str(r.resyncs),
                    r.last_error or "-",
                )
                for r in receivers
            ],
        )
    for note in notes:
        print(f"note: {note}")
    return 0 if readiness.ready else 1


def _summary(versions: Versions) -> dict[str, Any]:
    return versions.model_dump(mode="json", exclude={"versions"})


def show_versions(url: str, token: str | None, run: str | None, *, last: int, as_json: bool) -> None:
    """Print the newest `last` versions."""
    with ControlClient(url, run=run, token=token) as control:
        answer = control.versions(limit=min(last, 1000))
    shown = answer.versions[-last:]
    if as_json:
        print_json({**_summary(answer), "versions": [v.model_dump(mode="json") for v in shown]})
        return
    if not shown:
        print(f"run {answer.run} has no version yet")
        return
    print_table(
        ("version", "step", "base", "epoch", "changed", "dense tiles", "bytes", "bits/entry", "writers", "stages"),
        [_row(v) for v in shown],
        title=f"run {answer.run}",
    )


def _row(v: VersionInfo) -> tuple[str, ...]:
    marks = (" rewound" if v.rewound else "") + (" anchor" if v.anchor else "")
    marks += " diverged" if v.detail.get("diverged_replicas") else ""
    stages = ", ".join(f"{name} {human_ms(ms)}" for name, ms in v.timings_ms.items())
    return (
        f"{v.version}{marks}",
        str(v.step),
        "-" if v.base is None else str(v.base),
        str(v.epoch),
        percent(v.changed_fraction),
        str(v.dense_tiles),
        human_bytes(v.bytes),
        "-" if v.bits_per_entry is None else f"{v.bits_per_entry:.2f}",
        str(v.writers),
        stages or "-",
    )
