"""Rollouts from a real SGLang server that is a receiver of the rollout daemon.

At the end a second server loads the exported last version from disk, with SGLang's own loader, and must have the first
one's checksums and greedy answers. Invariant: no weights reach the first server but through the rollout daemon.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.demo.link import ReceiverFailed
from app.demo.processes import Child, free_port
from app.demo.rollouts import Note, Reload, Sampled, Verdict
from app.demo.sglang_server import SglangServer, SglangUnavailable, command, environment, find_python
from app.demo.task import Addition
from clients.http import Call, Sender, nothing, one
from clients.protocol import ReceiverInfo, ReceiverRegistration

if TYPE_CHECKING:
    import torch

    from app.demo.grpo import GenerateRequest
    from app.demo.model import Policy
    from app.demo.stage import Stage

NAME = "sglang-0"
START_TIMEOUT_S = 900.0
NOTE_EVERY_S = 15.0
GREEDY_PROMPTS = 4
GREEDY_TOKENS = 12


@dataclass(frozen=True)
class Seen:
    """What a server's weights are like, from outside: checksums by parameter, greedy answers by prompt."""

    checksums: dict[str, str]
    answers: list[list[int]]

    def reload(self, version: int, second: Seen, before: dict[str, str]) -> Reload:
        """Compare with what a second server, started from `version` on disk, shows. `before`: checksums at first."""
        names = self.checksums.keys() | second.checksums.keys()
        wrong = sorted(n for n in names if self.checksums.get(n) != second.checksums.get(n))
        answers = sum(a != b for a, b in zip(self.answers, second.answers, strict=True))
        changed = sum(before.get(n) != c for n, c in self.checksums.items())
        return Reload(version, len(names), changed, tuple(wrong), len(self.answers), answers)


class SglangRollouts:
    """One server: started here, or, with `url`, one that runs already. SglangUnavailable if there can be none."""

    def __init__(
        self,
        stage: Stage,
        *,
        python: Path | None,
        url: str | None,
        seed: int,
        transport: Literal["store", "p2p"] = "store",
    ) -> None:
        self.names = [NAME]
        self._stage = stage
        self._seed = seed
        self._transport: Literal["store", "p2p"] = transport
        self._python = find_python(python)
        self._base = stage.workdir / "model"
        self._child: Child | None = None
        self._prompts: list[list[int]] = []
        self._before: dict[str, str] = {}
        self._daemon = Sender(stage.rollout_url)
        stage.stack.callback(self._daemon.close)
        self._given = url is not None
        self._port = free_port()
        self._server = self._open(url or f"http://127.0.0.1:{self._port}")
        if self._given and not self._server.answers():
            raise SglangUnavailable(
                f"no SGLang server answers at {self._server.url}.", remedy="Start it, or leave out --sglang-url."
            )

    def start(self, policy: Policy) -> None:
        """Write the policy as a checkpoint and start the server from it."""
        from app.demo.checkpoint import write_checkpoint

        write_checkpoint(policy, self._base)
        problems = Addition(self._seed + 1)
        self._prompts = [
            policy.tokenizer(problems.next().prompt, add_special_tokens=False).input_ids for _ in range(GREEDY_PROMPTS)
        ]
        if not self._given:
            self._child = self._launch("sglang", self._base, self._port)

    def connect(self, note: Note) -> None:
        """Wait until the server answers, and register it."""
        if self._child is not None:
            self._wait(self._server, self._child, "the SGLang server starts", note)
        self._before = self._server.checksums()
        body = ReceiverRegistration(
            name=NAME, kind="sglang", run=self._stage.run, url=self._server.url, transport=self._transport
        )
        self._daemon.send(Call("POST", "/receivers", one(ReceiverInfo), body=body))

    def generate(self, request: GenerateRequest) -> Sampled:
        """One request with all prompts, sampled at temperature 1. A version label that is no number is an error."""
        answers = self._server.generate(request.prompts, request.max_new_tokens, temperature=1.0)
        versions = []
        for answer in answers:
            if len(answer.versions) != 1 or not answer.versions[0].isdecimal():
                raise ReceiverFailed(f"a completion's tokens come from the weights {', '.join(answer.versions)}.")
            versions.append(int(answer.versions[0]))
        return Sampled([a.tokens for a in answers], versions)

    def finish(self, model: torch.nn.Module, version: int, note: Note) -> Verdict:
        """Export the version, compare it with the trainer's weights, and a server that loads it with the first one."""
        from app.demo.checkpoint import WEIGHTS
        from app.demo.compare import compare
        from app.exporting import export_checkpoint

        note("asking the SGLang server for checksums and greedy answers")
        first = self._look(self._server)
        self._daemon.send(Call("DELETE", f"/receivers/{NAME}", nothing))
        if self._child is not None:  # two servers and a trainer would share the cores
            self._stage.children.end(self._child)
        note(f"exporting version {version}")
        directory = self._stage.workdir / "exported"
        done = export_checkpoint(
            "latest", directory, store=str(self._stage.store_dir), run=self._stage.run, base=self._base, token=None
        )
        if done.version != version:
            raise ReceiverFailed(f"the store's latest version is {done.version}; the server was left at {version}.")
        comparison = compare("exported checkpoint", directory / WEIGHTS, model.named_parameters())
        port = free_port()
        child = self._launch("sglang-second", directory, port)
        server = self._open(f"http://127.0.0.1:{port}")
        self._wait(server, child, f"a second SGLang server starts from version {version} on disk", note)
        return Verdict([comparison], first.reload(version, self._look(server), self._before))

    def _look(self, server: SglangServer) -> Seen:
        # One prompt at a time: what shares a batch may change the last bits of a logit, and so a greedy answer.
        answers = [server.generate([p], GREEDY_TOKENS, temperature=0.0)[0].tokens for p in self._prompts]
        return Seen(server.checksums(), answers)

    def _open(self, url: str) -> SglangServer:
        server = SglangServer(url)
        self._stage.stack.callback(server.close)
        return server

    def _launch(self, name: str, model: Path, port: int) -> Child:
        from app.demo.grpo import GrpoSettings

        line = command(self._python, model, port, requests=GrpoSettings().batch, seed=self._seed)
        return self._stage.children.start(name, line, environment(self._stage.workdir), guarded=True)

    def _wait(self, server: SglangServer, child: Child, what: str, note: Note) -> None:
        started = time.monotonic()
        noted = started - NOTE_EVERY_S

        def ready() -> bool:
            nonlocal noted
            now = time.monotonic()
            if now - noted >= NOTE_EVERY_S:
                noted = now
                note(f"{what} ({now - started:.0f} s; its log is {child.log})")
            return server.answers()

        self._stage.children.wait_until(f"the SGLang server ({child.name})", ready, START_TIMEOUT_S, every_s=0.5)
