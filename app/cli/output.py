"""How commands print: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def print_json(value: Any) -> None:
    """One JSON object on one line."""
    typer.echo(json.dumps(value, sort_keys=True))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """A table; columns whose name ends with a number's unit or `#` are the caller's to format."""
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        # A pipe has no width; do not cut what somebody greps for.
        console = Console(highlight=False, width=max(160, console.width))
    console.print(table)


def human_bytes(n: int | float) -> str:
    """`1.2 MB` style, powers of 1000."""
    value = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def human_ms(ms: float) -> str:
    """`12 ms` or `1.23 s`."""
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"


def percent(fraction: float) -> str:
    """A fraction as per cent with three digits after the point."""
    return f"{100 * fraction:.3f} %"
