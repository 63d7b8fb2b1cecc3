"""What the demo asks of whatever generates its rollouts, and the plain kind: receiver processes of its own.

Invariant: every completion says which version of the weights it was sampled from.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.demo.link import Link, ReceiverFailed
from app.demo.stage import START_TIMEOUT_S, Stage, environment

if TYPE_CHECKING:
    import torch

    from app.demo.compare import Comparison
    from app.demo.grpo import GenerateRequest
    from app.demo.model import Policy

Note = Callable[[str], None]


@dataclass(frozen=True)
class Sampled:
    """Completions as token ids, in the order of their prompts, and the version each was sampled from."""

    completions: list[list[int]]
    versions: list[int]

    def from_version(self, version: int) -> dict[str, int]:
        """How many completions came from which version: all from `version`, or ReceiverFailed."""
        found = Counter(self.versions)
        if set(found) - {version}:
            other = ", ".join(f"{n} from version {v}" for v, n in sorted(found.items()))
            raise ReceiverFailed(f"rollouts were to come from version {version}, but {other} came.")
        return {str(v): n for v, n in found.items()}


@dataclass(frozen=True)
class Reload:
    """How a second engine, started from the exported last version, compares with the one that received it.

    `parameters` and `prompts`: how many checksums, and greedy answers, were compared; `differing_…`: which, or how many
    of them, differ. `changed_parameters`: how many checksums of the first one were others when it was registered.
    """

    version: int
    parameters: int
    changed_parameters: int
    differing_parameters: tuple[str, ...]
    prompts: int
    differing_answers: int

    @property
    def same(self) -> bool:
        return self.parameters > 0 and self.prompts > 0 and not self.differing_parameters and not self.differing_answers


@dataclass(frozen=True)
class Verdict:
    """What was found at the end. `reload` None: the engine's weights were compared directly."""

    comparisons: list[Comparison]
    reload: Reload | None = None

    @property
    def exact(self) -> bool:
        direct = bool(self.comparisons) and all(c.bit_exact for c in self.comparisons)
        return direct and (self.reload is None or self.reload.same)


class Rollouts(Protocol):
    """The rollout side of one demo. Calls come in this order; `generate` any number of times."""

    @property
    def names(self) -> Sequence[str]:
        """The receivers' names."""

    def start(self, policy: Policy) -> None:
        """Start what generates; do not wait for it."""

    def connect(self, note: Note) -> None:
        """Wait until it answers, and is registered at the rollout daemon. `note` is told about progress."""

    def generate(self, request: GenerateRequest) -> Sampled:
        """Complete prompts with the weights that are there. ReceiverFailed if no proper answer comes."""

    def finish(self, model: torch.nn.Module, version: int, note: Note) -> Verdict:
        """Compare the weights that generated last, those of `version`, with the trainer's."""


class TorchRollouts:
    """Processes of `app.demo.receiver`, each doing its share of every request."""

    def __init__(self, stage: Stage, receivers: int, transport: str = "store") -> None:
        self.names = [f"rollout-{n}" for n in range(receivers)]
        self._transport = transport
        self._stage = stage
        self._sockets = stage.workdir
        self._links: list[Link] = []

    def start(self, policy: Policy) -> None:
        """Start the receiver processes; `connect` waits for them."""
        from clients.rollout.server import MAX_SOCKET_PATH

        stage = self._stage
        if max(len(os.fsencode(self._socket(name, "link"))) for name in self.names) > MAX_SOCKET_PATH:
            self._sockets = Path(stage.stack.enter_context(tempfile.TemporaryDirectory(prefix="dte-", dir="/tmp")))
        config = stage.workdir / "config.json"
        config.write_text(policy.config_json)
        threads = max(1, (os.cpu_count() or 1) // len(self.names))
        for name in self.names:
            command = [sys.executable, "-m", "app.demo.receiver", "--name", name, "--run", stage.run]
            command += ["--daemon", stage.rollout_url, "--config", str(config), "--threads", str(threads)]
            command += ["--link", str(self._socket(name, "link")), "--socket", str(self._socket(name, "dte"))]
            command += ["--transport", self._transport]
            stage.children.start(name, command, environment())

    def connect(self, note: Note) -> None:
        """Wait until every receiver process answers."""
        for name in self.names:
            path = self._socket(name, "link")
            self._stage.children.wait_until(f"the receiver process {name}", path.exists, START_TIMEOUT_S)
            link = Link(name, path)
            self._stage.stack.callback(link.close)
            link.call("ping")
            self._links.append(link)

    def generate(self, request: GenerateRequest) -> Sampled:
        """Completions from the receivers, each doing its share."""
        share = -(-len(request.prompts) // len(self._links))
        shares = [request.prompts[i : i + share] for i in range(0, len(request.prompts), share)]

        def ask(number: int) -> dict[str, Any]:
            return self._links[number].call(
                "generate",
                prompts=shares[number],
                max_new_tokens=request.max_new_tokens,
                seed=request.seed * 31 + number,
            )

        with ThreadPoolExecutor(len(shares)) as pool:
            answers = list(pool.map(ask, range(len(shares))))
        completions = [[int(t) for t in tokens] for answer in answers for tokens in answer["completions"]]
        return Sampled(completions, [int(a["version"]) for a in answers for _ in a["completions"]])

    def finish(self, model: torch.nn.Module, version: int, note: Note) -> Verdict:
        """Have every receiver write its live weights to a file, and compare these."""
        from app.demo.compare import compare

        note("comparing every parameter of every receiver with the trainer's")
        comparisons = []
        for link in self._links:
            file = self._stage.workdir / f"{link.name}.safetensors"
            link.call("dump", path=str(file))
            comparisons.append(compare(link.name, file, model.named_parameters()))
        return Verdict(comparisons)

    def _socket(self, name: str, kind: str) -> Path:
        return self._sockets / f"{name}.{kind}.sock"
