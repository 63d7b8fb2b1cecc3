"""No container engine runs here: the image's files are checked by structure, and its commands by running them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"


@dataclass(frozen=True)
class Instruction:
    stage: int
    name: str
    value: str


def parse(text: str) -> list[Instruction]:
    """Instructions of a Dockerfile, continuation lines joined."""
    found: list[Instruction] = []
    stage, pending = -1, ""
    for line in text.splitlines():
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        name, _, value = pending.partition(" ")
        assert name.isupper(), pending
        stage += name == "FROM"
        found.append(Instruction(stage, name, value.strip()))
        pending = ""
    assert not pending
    return found


@pytest.fixture
def dockerfile() -> list[Instruction]:
    return parse((DOCKER / "Dockerfile").read_text())


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def of(instructions: list[Instruction], name: str) -> list[Instruction]:
    return [i for i in instructions if i.name == name]


def environment(instructions: list[Instruction], stage: int) -> dict[str, str]:
    out: dict[str, str] = {}
    for i in of(instructions, "ENV"):
        if i.stage == stage:
            out.update(pair.split("=", 1) for pair in shlex.split(i.value))
    return out


def test_only_known_instructions(dockerfile: list[Instruction]) -> None:
    known = {
        "FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "LABEL", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL",
        "HEALTHCHECK", "ENTRYPOINT",
    }  # fmt: skip
    assert {i.name for i in dockerfile} <= known
    assert dockerfile[0].name == "FROM"


def test_bases_are_pinned_slim_and_the_same(dockerfile: list[Instruction]) -> None:
    bases = {i.value.split()[0] for i in of(dockerfile, "FROM")}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", bases.pop())


def test_it_runs_as_an_unprivileged_user_with_a_health_check(dockerfile: list[Instruction]) -> None:
    last = max(i.stage for i in dockerfile)
    (user,) = of(dockerfile, "USER")
    assert user.stage == last
    assert user.value not in ("root", "0")
    after_user = dockerfile[dockerfile.index(user) :]
    assert not of(after_user, "RUN")
    (check,) = of(dockerfile, "HEALTHCHECK")
    assert "/healthz" in check.value
    (entry,) = of(dockerfile, "ENTRYPOINT")
    assert entry.value == '["dte", "serve"]'


def test_compilers_and_pip_caches_stay_out_of_the_image(dockerfile: list[Instruction]) -> None:
    assert len(of(dockerfile, "FROM")) == 2
    assert environment(dockerfile, 0)["PIP_NO_CACHE_DIR"] == "1"
    assert not any("pip" in i.value for i in of(dockerfile, "RUN") if i.stage == 1)
    assert [i.value for i in of(dockerfile, "COPY") if i.stage == 1] == ["--from=build /opt/dte /opt/dte"]


def test_no_secret_is_baked_in(dockerfile: list[Instruction], compose: dict[str, Any]) -> None:
    for i in dockerfile:
        assert not re.search(r"(?i)(token|secret|password|signing_key)\s*=", i.value), i
    for name, service in compose["services"].items():
        for key, value in service.get("environment", {}).items():
            if re.search(r"(?i)token|secret|key", key):
                assert value.startswith("${DTE_TOKEN:?"), (name, key)


def test_everything_copied_exists_and_is_not_ignored(dockerfile: list[Instruction]) -> None:
    allowed = {
        line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    sources = [s for i in of(dockerfile, "COPY") if i.stage == 0 for s in i.value.split()[:-1]]
    assert set(sources) == allowed
    assert all((ROOT / s).exists() for s in sources)


def test_settings_of_the_image_are_settings(dockerfile: list[Instruction], compose: dict[str, Any]) -> None:
    from app.settings import ROLES, Settings

    names = {n for n in environment(dockerfile, 1) if n.startswith("DTE_")}
    for service in compose["services"].values():
        own = service.get("environment", {})
        names |= {n for n in own if n.startswith("DTE_")}
        assert set(own.get("DTE_ROLES", "store").split(",")) <= set(ROLES)
    assert names <= {"DTE_" + f.upper() for f in Settings.model_fields}


def test_trainer_and_daemon_share_memory_and_user(compose: dict[str, Any], dockerfile: list[Instruction]) -> None:
    services = compose["services"]
    assert services["trainer-daemon"]["ipc"] == "shareable"
    assert "shm_size" in services["trainer-daemon"]
    assert services["trainer"]["ipc"] == "service:trainer-daemon"
    uid = next(i.value.split("=")[1] for i in of(dockerfile, "ARG") if i.value.startswith("UID="))
    assert services["trainer"]["user"] == services["rollout"]["user"] == uid


def test_both_sides_meet_at_the_store(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert "store" in services["trainer-daemon"]["environment"]["DTE_ROLES"].split(",")
    assert services["rollout-daemon"]["environment"]["DTE_STORE"] == "http://trainer-daemon:7411/store"
    named = {v.split(":")[0] for s in services.values() for v in s.get("volumes", [])}
    assert named == set(compose["volumes"])
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


@pytest.mark.slow
def test_the_commands_of_the_image_build_and_run_a_daemon(dockerfile: list[Instruction], tmp_path: Path) -> None:
    """The build stage's copies and commands, the final stage's environment, entry point and health check, for real.

    Paths are moved into a temporary folder. What the new environment would download (torch and the other dependencies)
    is borrowed from the running one.
    """
    moved = {path: tmp_path / path.strip("/").replace("/", "-") for path in ("/opt/dte", "/src", "/wheels")}
    moved |= {path: tmp_path / path.strip("/").replace("/", "-") for path in ("/var/lib/dte", "/var/cache/dte")}

    def local(text: str) -> str:
        for path, here in moved.items():
            text = text.replace(path, str(here))
        return text

    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DTE_", "PYTHON", "VIRTUAL_ENV"))}
    built = {**clean, **{k: os.path.expandvars(local(v)) for k, v in environment(dockerfile, 0).items()}}
    moved["/src"].mkdir()
    for i in dockerfile:
        if i.stage != 0:
            continue
        if i.name == "COPY":
            *sources, target = i.value.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    ignore = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / source, moved["/src"] / target, ignore=ignore)
                else:
                    shutil.copy(ROOT / source, moved["/src"] / target)
        elif i.name == "RUN" and "TORCH" not in i.value:
            command = local(i.value)
            if command.startswith("python -m venv"):
                command = command.replace("python", shlex.quote(sys.executable), 1)
            done = subprocess.run(
                ["bash", "-euc", command], cwd=moved["/src"], env=built, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{i.value}\n{done.stdout}{done.stderr}"
            if "venv" in command:
                lend_packages(moved["/opt/dte"])

    token = "a-token-of-the-test"
    port = str(free_port())
    running = {**clean, **{k: os.path.expandvars(local(v)) for k, v in environment(dockerfile, 1).items()}}
    running |= {"DTE_PORT": port, "DTE_ROLES": "store,coordinator"}
    (entry,) = of(dockerfile, "ENTRYPOINT")
    (check,) = of(dockerfile, "HEALTHCHECK")
    serve = [str(moved["/opt/dte"] / "bin" / yaml.safe_load(entry.value)[0]), *yaml.safe_load(entry.value)[1:]]
    health = yaml.safe_load(check.value[check.value.index("[") :])
    health[0] = str(moved["/opt/dte"] / "bin" / health[0])

    # Reachable from outside and without a token: it must say no, in one message.
    refused = subprocess.run(serve, env=running, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "token" in refused.stderr
    assert "Traceback" not in refused.stderr

    log = tmp_path / "log"
    with log.open("w") as out:
        daemon = subprocess.Popen(serve, env={**running, "DTE_TOKEN": token}, cwd=tmp_path, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while "serving" not in log.read_text():
            assert daemon.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert subprocess.run(health, env=running, cwd=tmp_path, check=False).returncode == 0
        where = [health[0], "-c", "import app; print(app.__file__)"]
        found = subprocess.run(where, env=running, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert found.stdout.startswith(str(moved["/opt/dte"]))
        daemon.send_signal(getattr(signal, of(dockerfile, "STOPSIGNAL")[0].value))
        assert daemon.wait(60) == 0
        assert subprocess.run(health, env=running, cwd=tmp_path, capture_output=True, check=False).returncode != 0
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()


def lend_packages(venv: Path) -> None:
    """Let a virtual environment see the packages of this one, after its own."""
    (site,) = (venv / "lib").glob("python3.*/site-packages")
    lent = [p for p in sys.path if p.endswith("site-packages")]
    (site / "lent.pth").write_text("\n".join(lent) + "\n")
