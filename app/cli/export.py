"""`dte export`: prints what the exporter did.

Invariant: nothing is decided here but how it reads.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.cli.output import human_bytes, print_json
from app.exporting import Exported, export_checkpoint


def run_export(version: str, directory: Path, *, base: Path, as_json: bool = False, **options: Any) -> Exported:
    """`export_checkpoint` with its options, and print what was done. Signatures are checked with DTE_SIGNING_KEY when
    it is set."""
    key = os.environ.get("DTE_SIGNING_KEY")
    done = export_checkpoint(version, directory, base=base, signing_key=key.encode() if key else None, **options)
    if as_json:
        print_json({"ok": True, **asdict(done)})
    else:
        print(
            f"run {done.run}, version {done.version} (step {done.step}): {done.tensors} tensors, "
            f"{human_bytes(done.weight_bytes)} in {len(done.shards)} file{'s' if len(done.shards) != 1 else ''}, "
            f"{len(done.copied)} files from {base}; every digest is as decided: {done.directory}"
        )
        for note in done.notes:
            print(f"note: {note}")
    return done
