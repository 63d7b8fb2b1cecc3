"""Starts the processes of `dte bench p2p` and asks all of them the same.

Invariant: none is left when `Members` is closed, and each also ends by itself when this process does.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.errors import DteError

MODEL = "model"
"""The case of the model itself; others are named by the number of pieces."""
_STOP_TIMEOUT_S = 10.0
_TAIL_BYTES = 2000


class MemberFailed(DteError):
    """A process of the benchmark ended, or could not do its part."""

    code = "bench-member-failed"


class Members:
    """`senders` + `receivers` processes, by number in the group. Use as a context manager."""

    def __init__(self, folder: Path, senders: int, receivers: int) -> None:
        self.senders, self.receivers = senders, receivers
        self._logs = [folder / f"member-{n}.log" for n in range(senders + receivers)]
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for log in self._logs:
                with log.open("wb") as errors:
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "app.bench.p2p_rank"],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=errors,
                            text=True,
                        )
                    )
            commands = [
                {"folder": str(folder), "number": n, "senders": senders, "receivers": receivers}
                for n in range(senders + receivers)
            ]
            self._ask("begin", commands)
        except BaseException:
            self.close()
            raise

    def connect(self) -> dict[str, int]:
        """Make them one group; how many operations each case has."""
        port = self._ask("host", [{}], only=1)[0]["port"]
        operations: dict[str, int] = self.ask("connect", port=port)[0]["operations"]
        return operations

    def ask(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        """Everybody's answer, by number. MemberFailed names all that failed."""
        return self._ask(verb, [arguments] * len(self._processes))

    def _ask(self, verb: str, commands: list[dict[str, Any]], only: int | None = None) -> list[dict[str, Any]]:
        processes = self._processes[:only]
        for process, command in zip(processes, commands, strict=True):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # that it has ended is seen below
                process.stdin.write(json.dumps({"do": verb, **command}) + "\n")
                process.stdin.flush()
        answers = [self._answer(number) for number in range(len(processes))]
        failed = [f"member {n}: {a['error']}" for n, a in enumerate(answers) if "error" in a]
        if failed:
            raise MemberFailed(f"{verb} failed: " + "; ".join(failed))
        return answers

    def _answer(self, number: int) -> dict[str, Any]:
        out = self._processes[number].stdout
        assert out is not None
        line = out.readline()
        if not line:
            return {"error": f"ended. Its last words:\n{_tail(self._logs[number])}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _tail(log: Path) -> str:
    data = log.read_bytes()[-_TAIL_BYTES:]
    return data.decode(errors="replace").strip()
