"""The command tree. Commands import what they need when they run, so that `dte --help` is quick.

Invariant: a command here parses and explains its options and leaves the work to a module of its own.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from app.cli.bench import bench

app = typer.Typer(
    name="dte",
    help="Delta Transfer Engine: ships exactly the changed BF16 weights of an RL policy, and proves that they arrived.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")

Url = Annotated[str, typer.Option(envvar="DTE_URL", help="Address of a daemon.")]
Token = Annotated[str | None, typer.Option(envvar="DTE_TOKEN", help="Bearer token of that daemon or store.")]
Run = Annotated[str | None, typer.Option(help="Run to look at; the daemon's default run if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Store = Annotated[
    str | None,
    typer.Option(help="Store to read from: a directory, file:// or http(s)://host/store."),
]

_DEFAULT_URL = "http://127.0.0.1:7411"


class DemoEngine(StrEnum):
    """What generates the demo's rollouts."""

    TORCH = "torch"
    SGLANG = "sglang"


class DemoTransport(StrEnum):
    """How versions reach the demo's receivers."""

    STORE = "store"
    P2P = "p2p"


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dte {version('delta-transfer-engine')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = None,
    roles: Annotated[
        str | None, typer.Option(help="Comma-separated: store, coordinator, publisher, subscriber.")
    ] = None,
    store: Store = None,
    data_dir: Annotated[Path | None, typer.Option(help="Spool, cache and the embedded store.")] = None,
    run: Annotated[str | None, typer.Option(help="The run meant when a request names none.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run a daemon until it is interrupted.

    Every setting can also come from a DTE_* variable or the TOML file; options win over variables, variables over the
    file. Secrets (DTE_TOKEN, DTE_SIGNING_KEY) have no options, so that they do not show up in process lists.
    """
    from app.main import serve as serve_daemon
    from app.settings import Settings

    settings = Settings.load(
        config,
        host=host,
        port=port,
        roles=roles,
        store=store,
        data_dir=data_dir,
        run=run,
        log_level=log_level,
    )
    serve_daemon(settings, ready=lambda url: typer.echo(f"dte: serving {', '.join(settings.ordered_roles)} on {url}"))


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Policy versions to train and sync.")] = 5,
    receivers: Annotated[int, typer.Option(min=1, max=16, help="Receiver processes.")] = 1,
    minibatches: Annotated[int, typer.Option(min=1, max=16, help="Optimizer steps between two syncs.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of prompts, sampling and dithering.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON object on the last line of stdout.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Record the last optimizer step in this folder, for the benchmarks.")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Keep the working folder (store, logs) and say where it is.")] = False,
    engine: Annotated[
        DemoEngine, typer.Option(help="What generates the rollouts: own processes, or an SGLang server.")
    ] = DemoEngine.TORCH,
    transport: Annotated[
        DemoTransport, typer.Option(help="How versions reach the receivers: through the store, or rank to rank.")
    ] = DemoTransport.STORE,
    sglang_python: Annotated[
        Path | None,
        typer.Option(
            envvar="DTE_SGLANG_PYTHON",
            help="Interpreter of an environment with SGLang and this package (default: .venv-sglang/bin/python).",
        ),
    ] = None,
    sglang_url: Annotated[
        str | None,
        typer.Option(help="Use the server at this address, which serves a SmolLM2-135M on this machine as this user."),
    ] = None,
) -> None:
    """Train SmolLM2-135M with a short real RL loop and ship every policy version to rollout processes.

    Starts a trainer daemon, a rollout daemon and the receiver processes on this machine. Rollouts are generated by the
    receivers from the weights they received. At the end every receiver parameter is compared with the trainer's, bit
    for bit; the exit code is 1 if one differs.

    With --transport p2p the trainer's ranks send each version after the first straight to the receivers' processes.

    With --engine sglang the receiver is an SGLang server on the CPU. At the end the last version is exported as a
    checkpoint, which is compared with the trainer's parameters, and a second server that loads it must have the
    checksums and the greedy answers of the first.
    """
    if engine is DemoEngine.SGLANG and receivers != 1:
        raise typer.BadParameter("With --engine sglang there is one receiver.", param_hint="--receivers")
    if engine is not DemoEngine.SGLANG and sglang_url is not None:
        raise typer.BadParameter("It needs --engine sglang.", param_hint="--sglang-url")
    # Before torch loads OpenMP, and inherited by every child: trainer, receivers and workers share few cores here, and
    # threads that spin while they wait would take them from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    from app.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        steps=steps,
        receivers=receivers,
        minibatches=minibatches,
        seed=seed,
        json_output=as_json,
        record=record,
        keep=keep,
        engine=engine.value,
        transport=transport.value,
        sglang_python=sglang_python,
        sglang_url=sglang_url,
    )
    raise typer.Exit(run_demo(options))


@app.command()
def status(url: Url = _DEFAULT_URL, token: Token = None, run: Run = None, as_json: Json = False) -> None:
    """Show what a daemon does: its roles, the newest version, the receivers, and any degraded mode.

    Exits with 1 when the daemon is not ready.
    """
    from app.cli.status import show_status

    raise typer.Exit(show_status(url, token, run, as_json=as_json))


@app.command()
def versions(
    url: Url = _DEFAULT_URL,
    token: Token = None,
    run: Run = None,
    last: Annotated[int, typer.Option(min=1, help="Show the newest so many.")] = 20,
    as_json: Json = False,
) -> None:
    """List a run's versions with what changed, what it cost, and how long each stage took."""
    from app.cli.status import show_versions

    show_versions(url, token, run, last=last, as_json=as_json)


@app.command()
def plan(
    url: Url = _DEFAULT_URL,
    token: Token = None,
    run: Run = None,
    operations: Annotated[bool, typer.Option("--operations", help="List every operation too.")] = False,
    as_json: Json = False,
) -> None:
    """Show who sends what to whom, rank to rank: operations, bytes of each pair, and how even the senders' shares are.

    The daemon must be the coordinator where the run's ranks meet. The plan is computed here, from the members' layouts,
    as every member does.
    """
    from app.cli.plan import show_plan

    show_plan(url, token, run, operations=operations, as_json=as_json)


@app.command()
def inspect(
    what: Annotated[
        str, typer.Argument(help="A file, or with --store a key, of a chunk, part, decision or other record.")
    ],
    store: Store = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show what is inside a chunk or record."""
    from app.cli.inspecting import show_object

    show_object(what, store, token, as_json=as_json)


@app.command()
def verify(
    store: Annotated[str, typer.Argument(help="The store: a directory, file:// or http(s)://host/store.")],
    run: Annotated[str | None, typer.Option(help="The run to verify; needed when the store holds several.")] = None,
    token: Token = None,
    workdir: Annotated[
        Path | None, typer.Option(help="Folder for the rebuilt weights while verifying (default: the temporary one).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a whole run in a store, without any daemon.

    Reads every decision, part and chunk, checks their hashes, rebuilds the weights from the oldest complete version
    along the chain, and compares every tensor's digest with every decision. Exits with 1 if anything is wrong.
    Signatures are checked with DTE_SIGNING_KEY when it is set.
    """
    from app.cli.verifying import run_verify

    raise typer.Exit(run_verify(store, run, token, workdir=workdir, as_json=as_json))


@app.command()
def export(
    version: Annotated[str, typer.Argument(help="Number of a committed version, or `latest`.")],
    directory: Annotated[Path, typer.Argument(help="Directory to make; it must not exist.")],
    store: Annotated[str, typer.Option(help="The store: a directory, file:// or http(s)://host/store.")],
    base: Annotated[
        Path, typer.Option(help="Checkpoint directory of the same model, for its config and tokenizer files.")
    ],
    run: Annotated[str | None, typer.Option(help="The run; needed when the store holds several.")] = None,
    token: Token = None,
    shard_mb: Annotated[int, typer.Option(min=1, help="Largest size of a weight file, in MB (10^6 bytes).")] = 5000,
    workdir: Annotated[
        Path | None, typer.Option(help="Folder for chunks while exporting (default: beside the directory).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a version as a Hugging Face checkpoint that SGLang, vLLM or transformers load as it is.

    Every tensor is rebuilt from the store, written, read back, and compared with the digest in the version's decision;
    only then does the directory appear. If anything is wrong, nothing is left behind. Weight files in the base
    directory are not copied. Signatures are checked with DTE_SIGNING_KEY when it is set.
    """
    from app.cli.export import run_export

    run_export(
        version,
        directory,
        store=store,
        run=run,
        base=base,
        token=token,
        shard_bytes=shard_mb * 1_000_000,
        workdir=workdir,
        as_json=as_json,
    )
