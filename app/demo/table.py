"""The demo's live table: redrawn in place on a terminal, one line per version otherwise.

Invariant: everything goes to stdout, and nothing after `close`, so that a caller's last line stays the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from app.cli.output import human_bytes, human_ms, percent

_COLUMNS = ("version", "step", "changed", "bytes", "bits/entry", "stages", "hold", "lag", "proof", "reward", "sample")
_WIDTHS = (9, 5, 10, 10, 10, 58, 8, 8, 9, 7, 14)
_PAUSE, _PAUSE_WIDTH = "pause", 8


@dataclass(frozen=True)
class Row:
    """One sync. `version` None: nothing had changed, so no version was made.

    `pause_ms`: how long the engine generated nothing while the version was written, None where that is not known.
    `sampled_from`: how many of the completions that were trained on came from which version.
    """

    version: int | None
    step: int
    elements: int = 0
    changed: int = 0
    changed_fraction: float = 0.0
    bytes: int = 0
    bits_per_entry: float | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    hold_ms: float = 0.0
    lag_ms: float = 0.0
    proof: str = "-"
    path: str = "-"
    reward: float | None = None
    sample: str = ""
    dense_tiles: int = 0
    pause_ms: float | None = None
    sampled_from: dict[str, int] = field(default_factory=dict)

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        if self.version is None:
            name, changed = "unchanged", "0"
        else:
            name = str(self.version)
            changed = "all" if self.bits_per_entry is None and self.dense_tiles else percent(self.changed_fraction)
        return (
            name,
            str(self.step),
            changed,
            human_bytes(self.bytes),
            "-" if self.bits_per_entry is None else f"{self.bits_per_entry:.2f}",
            " ".join(f"{k} {human_ms(v)}" for k, v in self.timings_ms.items()) or "-",
            human_ms(self.hold_ms),
            "-" if self.version is None else human_ms(self.lag_ms),
            f"{self.proof} (p2p)" if self.path == "p2p" else self.proof,
            "-" if self.reward is None else f"{self.reward:.2f}",
            self.sample,
        )


class DemoTable:
    """Use as a context manager; `note` says what is happening, `add` appends a row. `pauses`: with `Row.pause_ms`."""

    def __init__(self, console: Console | None = None, *, pauses: bool = False) -> None:
        self._console = console or Console(highlight=False)
        self._pauses = pauses
        self._rows: list[Row] = []
        self._note = ""
        self._live: Live | None = None
        self._header_printed = False

    def note(self, text: str) -> None:
        """What the demo does now."""
        self._note = text
        if self._live is not None:
            self._live.update(self._render())
        else:
            print(f"· {text}", flush=True)

    def add(self, row: Row) -> None:
        """A finished sync."""
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._render())
            return
        if not self._header_printed:
            self._header_printed = True
            print(self._line(_COLUMNS, _PAUSE), flush=True)
        print(self._line(row.cells(), _pause(row)), flush=True)

    def _render(self) -> Table:
        last = (_PAUSE,) if self._pauses else ()
        table = Table(*_COLUMNS, *last, box=None, pad_edge=False, header_style="bold", caption=self._note)
        table.caption_justify = "left"
        for row in self._rows:
            cells = (*row.cells(), _pause(row)) if self._pauses else row.cells()
            table.add_row(*cells, style="" if row.proof == "proven" else "dim")
        return table

    def close(self) -> None:
        """Leave the table on the screen as it is."""
        if self._live is not None:
            self._note = ""
            self._live.update(self._render())
            self._live.stop()
            self._live = None

    def _line(self, cells: tuple[str, ...], pause: str) -> str:
        columns = list(zip(cells, _WIDTHS, strict=True)) + ([(pause, _PAUSE_WIDTH)] if self._pauses else [])
        return " ".join(c.ljust(w) for c, w in columns).rstrip()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _pause(row: Row) -> str:
    return "-" if row.pause_ms is None else human_ms(row.pause_ms)
