"""A real SGLang server on the CPU in processes of its own, with this project's plugin installed in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("DTE_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
START_S = 600.0

needs_sglang = pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment; `make sglang` builds it")


class Server:
    """Started at once; `wait_ready` blocks until it answers. `extra`: more command-line arguments."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        tp: int = 1,
        port: int | None = None,
        extra: tuple[str, ...] = (),
        **variables: str,
    ):
        self.model, self.folder, self.tp = model, folder, tp
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=300.0)
        self.faults = folder / f"faults-{self.port}"
        self.faults.mkdir(exist_ok=True)
        self.log = folder / f"sglang-{self.port}.log"
        self._extra = extra
        self._variables = variables
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DTE_SGLANG_SOCKET_DIR": str(self.folder / "sockets"),
            "DTE_SGLANG_CACHE_DIR": str(self.folder / "layouts"),
            "DTE_TEST_FAULTS": str(self.faults),
            **self._variables,
        }
        if self.tp > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(n % (os.cpu_count() or 1)) for n in range(self.tp)
            )
        arguments = [
            str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(self.model), "--device", "cpu",
            "--tp-size", str(self.tp), "--host", "127.0.0.1", "--port", str(self.port),
            "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
            "--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", "4096",
            "--max-running-requests", "4", "--context-length", "512", "--skip-server-warmup",
            "--sleep-on-idle", *self._extra,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            return subprocess.Popen(
                arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.tail()
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/model_info", timeout=5.0).status_code == 200:
                    return self
            time.sleep(0.5)
        raise AssertionError(f"the server was not ready within {START_S} s\n{self.tail()}")

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        self.kill()
        self.http.close()

    # --- what it says -----------------------------------------------------------------------------------------------

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        answer.raise_for_status()
        return answer.json()

    def checksums(self) -> list[dict[str, str]]:
        """By parameter, for every rank: the engine's own view of its weights."""
        answer = self.post("/weights_checker", action="checksum")
        assert answer.status_code == 200, answer.text
        return [rank["checksums"] for rank in answer.json()["ranks"]]

    def generate(self, text: str = "hello world", tokens: int = 8) -> dict[str, Any]:
        """`output_ids` and `meta_info` of a greedy answer."""
        answer = self.post(
            "/generate", text=text, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    @property
    def weight_version(self) -> str:
        return str(self.get("/model_info")["weight_version"])
