"""A rollout process of the demo: `python -m app.demo.receiver`. It generates from whatever weights dte gave it.

It starts with zeroed weights and gets every version, the first included, from its rollout daemon. Invariant: it
generates only inside `receiver.serving()`, so from one proven version at a time.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from app.demo.compute import widen_compute
from app.demo.grpo import GenerateRequest
from app.demo.link import LinkServer
from app.demo.model import build
from app.demo.sampling import generate
from clients.rollout.torch import TorchReceiver

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SERVING_TIMEOUT_S = 60.0


class _Operations:
    """What the trainer side may ask of this process."""

    def __init__(self, model: LlamaForCausalLM, receiver: TorchReceiver) -> None:
        self._model = model
        self._receiver = receiver
        self._one_at_a_time = threading.Lock()

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Complete prompts from the installed version, which the answer names."""
        what = GenerateRequest(request["prompts"], int(request["max_new_tokens"]), int(request["seed"]))
        with self._one_at_a_time, self._receiver.serving(SERVING_TIMEOUT_S):
            return {"completions": generate(self._model, what), "version": self._receiver.version}

    def dump(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write the live parameters to a safetensors file, by their first name."""
        from safetensors.torch import save_file

        with self._one_at_a_time, self._receiver.serving(SERVING_TIMEOUT_S):
            save_file({n: p.detach() for n, p in self._model.named_parameters()}, request["path"])
            return {"version": self._receiver.version}

    @staticmethod
    def ping(request: dict[str, Any]) -> dict[str, Any]:
        return {}


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> None:
    """Serve until the standard input closes (the demo is gone) or a signal arrives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--daemon", required=True, help="base URL of the rollout daemon")
    parser.add_argument("--config", required=True, type=Path, help="JSON of the model's config")
    parser.add_argument("--link", required=True, type=Path, help="Unix socket for the trainer's calls")
    parser.add_argument("--socket", required=True, type=Path, help="Unix socket for the rollout daemon")
    parser.add_argument("--transport", choices=("store", "p2p"), default="store")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, _stop)
    torch.set_num_threads(arguments.threads)
    model = build(arguments.config.read_text(), torch.bfloat16)
    widen_compute(model)
    with TorchReceiver(
        model,
        name=arguments.name,
        run=arguments.run,
        daemon=arguments.daemon,
        socket_path=arguments.socket,
        transport=arguments.transport,
    ) as receiver:
        operations = _Operations(model, receiver)
        table = {"generate": operations.generate, "dump": operations.dump, "ping": operations.ping}
        with LinkServer(arguments.link, table) as server:
            threading.Thread(target=server.serve_forever, name="demo-link", daemon=True).start()
            sys.stdin.buffer.read()
            server.shutdown()


if __name__ == "__main__":
    main()
