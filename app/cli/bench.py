"""`dte bench`: options of the benchmarks, which live in app.bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.stopping import terminate_as_exit

bench = typer.Typer(
    help="Benchmarks on state recorded from the demo's RL run (recorded first if there is none yet).",
    no_args_is_help=True,
)


@bench.callback()
def begin(context: typer.Context) -> None:
    context.with_resource(terminate_as_exit())


Record = Annotated[
    Path | None,
    typer.Option(help="Folder of a record made by `dte demo --record`; default .cache/bench, made if missing."),
]
Repeats = Annotated[int, typer.Option(min=1, max=1000, help="Measurements of each kind; medians are reported.")]
Json = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line of stdout.")]


@bench.command()
def construct(
    record: Record = None,
    repeats: Repeats = 5,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of the cpu backend.")] = 2,
    reference: Annotated[bool, typer.Option(help="Measure the slow reference backend too.")] = True,
    as_json: Json = False,
) -> None:
    """Time finding the changes: both backends, beside merely reading the three arrays, and the snapshot detector."""
    from app.bench.construct import run_construct

    run_construct(record, repeats=repeats, threads=threads, reference=reference, json_output=as_json)


@bench.command()
def wire(record: Record = None, as_json: Json = False) -> None:
    """Bits a changed element costs on the wire: this format, PULSE's layout, and the entropy."""
    from app.bench.wire import run_wire

    run_wire(record, json_output=as_json)


@bench.command()
def memory(record: Record = None, as_json: Json = False) -> None:
    """Extra memory of a worker process while it publishes: certified detection beside the snapshot detector."""
    from app.bench.memory import run_memory

    run_memory(record, json_output=as_json)


@bench.command()
def p2p(
    record: Annotated[
        Path | None, typer.Option(help="Folder of a record made by `dte demo --record`, in place of a synthetic model.")
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(min=1, max=2_000_000_000, help="About so many in the synthetic model [default: 135 M]."),
    ] = None,
    changed: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Fraction that changes in it [default: 0.01].")
    ] = None,
    senders: Annotated[int, typer.Option(min=1, max=64, help="Trainer ranks, each with a flat shard.")] = 2,
    receivers: Annotated[int, typer.Option(min=1, max=64, help="Tensor-parallel receiver ranks.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Measurements of each; medians are reported.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the synthetic model.")] = 0,
    as_json: Json = False,
) -> None:
    """Time rank to rank transfer over Gloo: beside sending all weights, and beside PULSE's patch broadcast."""
    from app.bench.p2p import Options, run_p2p

    options = Options(record, parameters, changed, senders, receivers, rounds, seed)
    run_p2p(options, json_output=as_json)
