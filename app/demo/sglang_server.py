"""An SGLang server as the demo sees it: where its interpreter is, how it is started, what it answers.

Invariant: the server runs in an environment of its own; nothing of this process's Python, and no DTE_* variable meant
for others, reaches it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.demo.link import ReceiverFailed
from clients.http import client_settings
from engine.errors import DteError

DEFAULT_PYTHON = Path(".venv-sglang/bin/python")
REQUEST_TIMEOUT_S = 300.0
_PROBE_TIMEOUT_S = 60.0
_PROBE = (
    "import importlib.util as u, importlib.metadata as m;"
    "print(int(u.find_spec('sglang') is not None),"
    "int(any(e.name == 'dte' for e in m.entry_points(group='sglang.srt.plugins'))))"
)


class SglangUnavailable(DteError):
    """There is no SGLang to generate rollouts with."""

    code = "demo-sglang-unavailable"


def find_python(named: Path | None) -> Path:
    """The interpreter of an environment with SGLang and this package. SglangUnavailable if there is none.

    `named`: the one that was asked for; without it, that of `.venv-sglang` in the working directory.
    """
    remedy = "Run `make sglang` in a checkout, or name an environment's interpreter with --sglang-python."
    # Not resolved: the link's own place is what makes an interpreter that of its environment.
    python = (named or DEFAULT_PYTHON).absolute()
    if not python.exists():
        where = f"{python} does not exist" if named else f"there is no {DEFAULT_PYTHON} in the working directory"
        raise SglangUnavailable(f"the demo needs an environment with SGLang: {where}.", remedy=remedy)
    try:
        asked = subprocess.run(
            [str(python), "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SglangUnavailable(f"{python} cannot be run: {error}.", remedy=remedy) from None
    answer = asked.stdout.split()
    if asked.returncode != 0 or len(answer) != 2:
        raise SglangUnavailable(f"{python} is no Python interpreter: {asked.stderr[-300:].strip()}", remedy=remedy)
    if answer[0] == "0":
        raise SglangUnavailable(f"the environment of {python} has no SGLang.", remedy=remedy)
    if answer[1] == "0":
        raise SglangUnavailable(
            f"the environment of {python} has SGLang, but not this package: its server would be no receiver.",
            remedy=f"Run: {python} -m pip install --no-deps delta-transfer-engine (or the path of a checkout).",
        )
    return python


def command(python: Path, model: Path, port: int, *, requests: int, seed: int) -> list[str]:
    """How a server on this machine's CPU is started. `requests`: so many run at once."""
    return [
        str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
        "--host", "127.0.0.1", "--port", str(port), "--random-seed", str(seed),
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle",
        "--max-running-requests", str(requests), "--max-total-tokens", "4096", "--context-length", "512",
    ]  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """A server's environment: one thread, as the trainer needs the other cores, and its files below `folder`.

    Its sockets are where the plugin puts them by itself: below a long `folder` their paths could be too long.
    """
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(("DTE_", "PYTHON"))}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a demo
        "HF_HUB_OFFLINE": "1",
        "DTE_SGLANG_CACHE_DIR": str(folder / "layouts"),
    }


@dataclass(frozen=True)
class Answer:
    """One completion and the version labels of the weights its tokens came from, in order."""

    tokens: list[int]
    versions: tuple[str, ...]


class SglangServer:
    """Talks to one server. ReceiverFailed if it does not answer, or not as expected."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(transport=transport, timeout=REQUEST_TIMEOUT_S, **client_settings(url, None))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def answers(self) -> bool:
        """Whether it is there and has loaded its model."""
        try:
            return self._http.get("/model_info", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> list[Answer]:
        """Complete every prompt by exactly `max_new_tokens` tokens; all prompts are in one request."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": True}
        body = {"input_ids": [list(p) for p in prompts], "sampling_params": sampling}
        found = self._post("/generate", body)
        try:
            if len(found) != len(prompts):
                raise ValueError(f"{len(found)} completions of {len(prompts)} prompts")
            return [_answer(one) for one in found]
        except (KeyError, TypeError, ValueError) as error:
            raise ReceiverFailed(f"the SGLang server's completions are not understood: {error!r}.") from None

    def checksums(self) -> dict[str, str]:
        """The engine's own checksum of each live parameter, by rank and name."""
        found = self._post("/weights_checker", {"action": "checksum"})
        try:
            return {f"{n}/{k}": str(v) for n, rank in enumerate(found["ranks"]) for k, v in rank["checksums"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ReceiverFailed(f"the SGLang server's checksums are not understood: {error!r}.") from None

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            answer = self._http.post(path, json=body)
            if answer.status_code == 200:
                return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ReceiverFailed(
                f"the SGLang server at {self.url} did not answer {path}: {type(error).__name__}: {error}."
            ) from None
        raise ReceiverFailed(f"the SGLang server refused {path} ({answer.status_code}): {answer.text[:300]}")


def _answer(one: dict[str, Any]) -> Answer:
    meta = one["meta_info"]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    labels = [str(span["version"]) for span in spans] + [str(meta["weight_version"])]
    return Answer([int(t) for t in one["output_ids"]], tuple(dict.fromkeys(labels)))
