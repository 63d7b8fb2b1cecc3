"""The `dte` command as tests run it: a process of its own that has imported everything when it starts.

One invariant: the command sees the arguments, the variables and the folder it is given, as started by a user.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.support.processes import Channel, Child

ROOT = Path(__file__).parents[2]


def dte(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `dte` in this environment without its DTE_* and with `variables`; how it ended and what it printed."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("DTE_")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = Child(
            "dte",
            "tests.support.command:run",
            folder,
            arguments=arguments,
            cwd=str(cwd),
            environment={**plain, **variables},
            printed=name,
        )
        try:
            code = child.receive()["code"]
            out, err = ((folder / n).read_text() for n in ("out", "err"))
            return subprocess.CompletedProcess(["dte", *arguments], code, out, err)
        finally:
            child.end()


def run(channel: Channel, *, arguments: list[str], cwd: str, environment: dict[str, str], printed: str) -> None:
    """The command's process: answers its exit code after all it has to say is in `printed`/out and err."""
    from app.cli import main

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # asked for again, in this environment
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(printed) / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["dte", *arguments]
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send({"code": code})
