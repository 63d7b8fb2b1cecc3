"""Starts and drives rank processes; those that died are replaced when they are wanted again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class RankProcess:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transports.p2p.rank_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """The next answer; None if the process ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def wait_stopped(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Let it end by itself; how it did."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Pool:
    def __init__(self) -> None:
        self._ranks: list[RankProcess] = []
        self._groups = 0

    def ranks(self, n: int) -> list[RankProcess]:
        self._ranks = [r for r in self._ranks if r.process.poll() is None]
        while len(self._ranks) < n:
            self._ranks.append(RankProcess())
        # All have started: no deadline of a test includes that.
        assert every(self._ranks, do="close") == [{"done": True}] * len(self._ranks)
        return self._ranks[:n]

    def drop(self, rank: RankProcess) -> None:
        """Use it no more."""
        self._ranks.remove(rank)
        rank.kill()

    def group(self) -> str:
        self._groups += 1
        return f"group-{self._groups}"

    def end(self) -> list[int]:
        codes = [r.end() for r in self._ranks if r.process.poll() is None]
        for rank in self._ranks:
            rank.kill()
        return codes


def every(ranks: list[RankProcess], **command: Any) -> list[dict[str, Any] | None]:
    """The answers of all ranks to one command, in which `rank` is each one's number."""
    for number, rank in enumerate(ranks):
        rank.ask(**command, rank=number)
    return [rank.answer() for rank in ranks]


def connected(ranks: list[RankProcess], port: int, group: str) -> None:
    answers = every(ranks, do="connect", port=port, group=group, size=len(ranks), timeout_s=60.0)
    assert all(a is not None and "error" not in a for a in answers), answers
