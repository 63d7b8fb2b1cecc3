"""`dte plan`: who sends what to whom, rank to rank, and what the newest exchange cost."""

from __future__ import annotations

from app.cli.output import human_bytes, human_ms, percent, print_json, print_table
from app.p2p.messages import GroupView, View
from clients.http import Call, Sender, one
from engine.errors import InvalidInput, StateConflict
from engine.plan.operations import Operation
from engine.plan.planning import Plan
from engine.plan.statistics import PlanStatistics, statistics


def show_plan(url: str, token: str | None, run: str | None, *, operations: bool, as_json: bool) -> None:
    """Print the plan of the run's group. StateConflict if there is none now."""
    if run is None:
        raise InvalidInput("a run must be named.", remedy="Add --run.")
    from transports.p2p.planning import plan_of
    from transports.p2p.roster import parse

    sender = Sender(url, token=token)
    try:
        view = sender.send(Call("GET", f"/p2p/{run}", one(View)))
        if view.group is None:
            raise StateConflict(
                f"run {run!r} has no P2P group now: {_why_none(view)}.",
                remedy="It needs every trainer rank, and a receiver with transport p2p or auto, all with DTE_P2P=true.",
            )
        path = f"/p2p/{run}/groups/{view.group.id}/roster"
        plan = plan_of(parse(sender.send(Call("GET", path, lambda response: response.content))))
    finally:
        sender.close()
    if as_json:
        print_json(_as_json(view, view.group, plan, operations=operations))
    else:
        _print(view, view.group, plan, operations=operations)


def _why_none(view: View) -> str:
    if view.trouble:
        return view.trouble
    kinds = {member.split(":", 1)[0] for member in view.members}
    missing = [
        what for what, kind in (("trainer ranks", "trainer"), ("receiver ranks", "receiver")) if kind not in kinds
    ]
    return f"no {' and no '.join(missing)} have joined" if missing else "not all ranks have joined"


def _names(group: GroupView) -> tuple[list[str], list[str]]:
    return group.members[: group.senders], group.members[group.senders :]


def _bytes_of_pairs(view: View, group: GroupView) -> dict[tuple[int, int], int]:
    """Bytes of the newest exchange, by pair, as the senders reported them."""
    out: dict[tuple[int, int], int] = {}
    for number, name in enumerate(_names(group)[0]):
        report = view.exchange.get(name)
        if report is not None and report.what == "done":
            out |= {(number, receiver): count for receiver, count in report.pairs.items()}
    return out


def _print(view: View, group: GroupView, plan: Plan, *, operations: bool) -> None:
    stats = statistics(plan)
    senders, receivers = _names(group)
    print(
        f"run {view.run}: group {group.id} is {group.state}, {len(senders)} senders, {len(receivers)} receivers, "
        f"carried by {group.carrier}"
    )
    print(
        f"{stats.operations} operations reach {stats.lanes:,} elements of 16 bits; the busiest sender has "
        f"{stats.balance:.3f} times the mean; plan {plan.digest[:16]}"
    )
    moved = _bytes_of_pairs(view, group)
    print()
    print_table(
        (
            "sender",
            "receiver",
            "operations",
            "elements",
            "share",
            "bytes" if group.go is None else f"v{group.go.version}",
        ),
        [
            (
                senders[s],
                receivers[r],
                str(share.operations),
                f"{share.lanes:,}",
                percent(share.share),
                human_bytes(moved[s, r]) if (s, r) in moved else "-",
            )
            for (s, r), share in sorted(stats.pairs.items())
        ],
    )
    if view.exchange:
        print()
        print_table(
            ("member", "newest exchange", "entries", "bytes", "time"),
            [
                (
                    name,
                    r.what if not r.why else f"{r.what}: {r.why}",
                    f"{r.entries:,}",
                    human_bytes(r.bytes),
                    human_ms(r.ms),
                )
                for name, r in sorted(view.exchange.items())
            ],
        )
    if operations:
        print()
        print_table(
            ("sender", "receiver", "tensor", "elements", "slices"),
            [(senders[o.sender], receivers[o.receiver], o.tensor, f"{o.lanes:,}", _slices(o)) for o in plan.operations],
        )


def _slices(operation: Operation) -> str:
    return ", ".join(str(part.slice) for part in operation.parts)


def _as_json(view: View, group: GroupView, plan: Plan, *, operations: bool) -> dict[str, object]:
    stats: PlanStatistics = statistics(plan)
    senders, receivers = _names(group)
    moved = _bytes_of_pairs(view, group)
    out: dict[str, object] = {
        "run": view.run,
        "group": group.model_dump(mode="json"),
        "plan": plan.digest,
        "operations": stats.operations,
        "elements": stats.lanes,
        "balance": stats.balance,
        "exchange": {name: report.model_dump(mode="json") for name, report in view.exchange.items()},
        "pairs": [
            {
                "sender": senders[s],
                "receiver": receivers[r],
                "operations": share.operations,
                "elements": share.lanes,
                "bytes": moved.get((s, r)),
            }
            for (s, r), share in sorted(stats.pairs.items())
        ],
    }
    if operations:
        out["list"] = [
            {"sender": senders[o.sender], "receiver": receivers[o.receiver], "tensor": o.tensor, "elements": o.lanes}
            for o in plan.operations
        ]
    return out
