"""The plain torch receiver: its protocol over a real socket, in a real process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clients.rollout import protocol as p
from clients.rollout.core import ReceiverCore
from clients.rollout.gate import Gate
from clients.rollout.protocol import MAX_FRAME_BYTES, ChunkBody, ReceiverClient, ReceiverError, ReceiverGone, TargetBody
from clients.rollout.torch import ModuleWeights, TorchReceiver
from engine.apply import Target
from engine.errors import CodecError, InvalidInput, StateConflict
from engine.records import TensorDigest
from tests.support.receiver_process import Process, TinyModel, dump, load, tiny_metas, tiny_state
from tests.support.versions import State, changed, local_target
from tests.support.views import PretendTensor, pretending

pytestmark = pytest.mark.anyio


def body_of(target: Target) -> TargetBody:
    return TargetBody(
        run=target.run,
        version=target.version,
        step=target.step,
        base=target.base,
        tensors=list(target.tensors),
        base_digests=target.base_digests,
        chunks=[
            ChunkBody(
                path=str(c.path), sha256=c.sha256, size_bytes=c.size_bytes, raw_bytes=c.raw_bytes, entries=c.entries
            )
            for c in target.chunks
        ],
    )


def next_state(state: State, seed: int = 1) -> State:
    new = changed(state, np.random.default_rng(seed), 0.1)
    new["counter"] = state["counter"].copy()
    new["counter"][1] ^= 1
    return new


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.end()


def spawn(processes: list[Process], folder: Path, seed: int = 0, **config: Any) -> Process:
    """A process at the weights of `seed`; those without a configuration of their own are used again."""
    name = "-".join(["p", *config])
    process = next((p for p in processes if p.name == name), None)
    if process is None:
        process = Process(folder, name, **config)
        processes.append(process)
    process.ask("reset", seed=seed)
    return process


async def owner(process: Process) -> ReceiverClient:
    """A new owner, with the next fence."""
    link = await ReceiverClient.connect(process.socket)
    await link.attach("test", (await link.status()).fence + 1)
    return link


async def until_phase(process: Process, phase: str) -> None:
    link = await ReceiverClient.connect(process.socket)
    try:
        async with asyncio.timeout(30):
            while (await link.status()).phase != phase:  # noqa: ASYNC110 - the state is another process's
                await asyncio.sleep(0.02)
    finally:
        await link.aclose()


async def test_a_version_through_the_socket(tmp_path: Path, processes: list[Process]) -> None:
    process = spawn(processes, tmp_path)
    base, new = tiny_state(0), next_state(tiny_state(0))
    link = await owner(process)
    described = await link.describe()
    names = {n for t in described.tensors for n in t.names}
    assert names == {*base, "lm_head.weight"}
    target = body_of(local_target(tmp_path, tiny_metas(), new, base, writers=2))
    assert (await link.status()).version is None
    prepared = await link.prepare(target)
    assert prepared.after == {t.name: t.digest for t in target.tensors}
    assert same(process.weights(), base)
    await link.commit(1)
    status = await link.finalize(1)
    assert (status.version, status.phase, status.ready) == (1, "clean", True)
    assert same(process.weights(), new)
    assert process.ask("status")["step"] == 10
    await link.aclose()


async def test_only_the_newest_owner_commands(tmp_path: Path, processes: list[Process]) -> None:
    process = spawn(processes, tmp_path)
    target = body_of(local_target(tmp_path, tiny_metas(), next_state(tiny_state(0)), tiny_state(0)))
    nobody = await ReceiverClient.connect(process.socket)
    with pytest.raises(ReceiverError) as refused:
        await nobody.prepare(target)
    assert refused.value.code == "fenced-off"
    old = await owner(process)
    fence = (await old.status()).fence
    await old.prepare(target)
    new = await ReceiverClient.connect(process.socket)
    with pytest.raises(ReceiverError) as refused:
        await new.attach("other", fence)
    assert refused.value.code == "fenced-off"
    await new.attach("other", fence + 1)
    for deposed in (old.commit(1), old.status()):
        with pytest.raises(ReceiverError) as refused:
            await deposed
        assert refused.value.code == "fenced-off"
    assert (await nobody.status()).fence == fence + 1
    await new.abort()
    assert same(process.weights(), tiny_state(0))
    for link in (nobody, old, new):
        await link.aclose()


@pytest.mark.faults
@pytest.mark.parametrize("stage", ["prepared", "written"])
async def test_the_watchdog_ends_what_a_dead_owner_left(tmp_path: Path, processes: list[Process], stage: str) -> None:
    process = spawn(processes, tmp_path)
    base, new = tiny_state(0), next_state(tiny_state(0))
    link = await owner(process)
    await link.prepare(body_of(local_target(tmp_path, tiny_metas(), new, base)))
    if stage == "written":
        await link.commit(1)
        assert same(process.weights(), new)
    await link.aclose()  # what the kernel does for a killed daemon
    await until_phase(process, "clean")
    assert same(process.weights(), base)
    assert process.ask("status")["version"] is None


async def test_a_silent_owner_is_rolled_back_too(tmp_path: Path, processes: list[Process]) -> None:
    process = spawn(processes, tmp_path, finalize_timeout_s=0.2)
    base, new = tiny_state(0), next_state(tiny_state(0))
    link = await owner(process)
    await link.prepare(body_of(local_target(tmp_path, tiny_metas(), new, base)))
    await link.commit(1)
    await until_phase(process, "clean")
    assert same(process.weights(), base)
    with pytest.raises(ReceiverError):
        await link.finalize(1)
    await link.aclose()


async def test_a_new_owner_in_time_may_roll_back(tmp_path: Path, processes: list[Process]) -> None:
    process = spawn(processes, tmp_path, owner_grace_s=60.0)
    base, new = tiny_state(0), next_state(tiny_state(0))
    link = await owner(process)
    await link.prepare(body_of(local_target(tmp_path, tiny_metas(), new, base)))
    await link.commit(1)
    await link.aclose()
    link = await owner(process)
    assert (await link.status()).phase == "written"
    await link.rollback()
    assert same(process.weights(), base)
    await link.aclose()


async def test_commit_waits_for_requests_and_gives_up(tmp_path: Path, processes: list[Process]) -> None:
    process = spawn(processes, tmp_path)
    base, one = tiny_state(0), next_state(tiny_state(0))
    link = await owner(process)
    await link.prepare(body_of(local_target(tmp_path, tiny_metas(), one, base)))
    await link.commit(1)
    await link.finalize(1)
    assert process.ask("serve")["entered"]
    two = next_state(one, 2)
    await link.prepare(body_of(local_target(tmp_path, tiny_metas(), two, one, version=2)))
    with pytest.raises(ReceiverError) as busy:
        await link.commit(2, wait_s=0.05)
    assert busy.value.code == "state-conflict"
    assert same(process.weights(), one), "nothing is written while somebody is served"
    waiting = asyncio.create_task(link.commit(2))
    process.ask("leave")
    await waiting
    await link.finalize(2)
    assert same(process.weights(), two)
    await link.aclose()


@pytest.mark.parametrize("what", ["poke", "replace"])
async def test_weights_touched_by_others_lose_their_proof(tmp_path: Path, processes: list[Process], what: str) -> None:
    process = spawn(processes, tmp_path)
    base, one = tiny_state(0), next_state(tiny_state(0))
    one["norm.weight"] = np.arange(16).astype(np.uint16) + 0x3F80
    link = await owner(process)
    await link.prepare(body_of(local_target(tmp_path, tiny_metas(), one, base)))
    await link.commit(1)
    before = await link.finalize(1)
    target = body_of(local_target(tmp_path, tiny_metas(), next_state(one, 2), one, version=2))
    await link.prepare(target)
    assert not process.ask(what)["ready"]
    after = await link.status()
    assert after.generation > before.generation
    assert after.version is None
    with pytest.raises(ReceiverError):
        await link.commit(2)
    if what == "poke":
        with pytest.raises(ReceiverError) as wrong:
            await link.prepare(target)
        assert wrong.value.code == "wrong-base"
        assert wrong.value.detail == {"tensors": ["norm.weight"]}
    else:
        await link.prepare(target)
        await link.commit(2)
        await link.finalize(2)
        assert same(process.weights(), next_state(one, 2)), "the new tensor is the one that is written"
    await link.aclose()


async def test_a_resync_of_a_hundred_thousand_tensors_fits_into_a_frame(tmp_path: Path) -> None:
    names = [f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.down_proj.weight" for i in range(100_000)]
    tensors = [TensorDigest(name=name, shape=(4096, 1536), digest="0" * 16) for name in names]
    chunk = ChunkBody(path="/x" * 50, sha256="0" * 64, size_bytes=1, raw_bytes=1, entries=1)
    digests = {t.name: t.digest for t in tensors}
    plan = [
        TargetBody(run="r", version=v, step=v, base=v - 1, tensors=tensors, base_digests=digests, chunks=[chunk] * 100)
        for v in range(1, 33)
    ]
    asked = asyncio.Queue[tuple[int, p.Resync]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = p.frame_length(await reader.readexactly(p.HEADER_BYTES))
        request = p.unpack(p.Request, await reader.readexactly(length))
        await asked.put((length, p.parse_body(p.Resync, request.body)))
        result = p.Digests(digests={}, generation=0).model_dump(mode="json")
        writer.write(p.pack(p.Response(id=request.id, result=result)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "s")
    async with server:
        link = await ReceiverClient.connect(tmp_path / "s")
        await link.resync(plan)
        await link.aclose()
    length, body = asked.get_nowait()
    assert length < MAX_FRAME_BYTES / 2
    assert [len(t.tensors) for t in body.targets] == [0] * 31 + [100_000]
    assert [len(t.chunks) for t in body.targets] == [100] * 32
    # What cannot fit says why.
    with pytest.raises(CodecError, match="exceeds") as refused:
        p.pack(p.Resync(targets=[t.model_copy(update={"base_digests": None}) for t in plan[:8]]))
    assert "anchor" in refused.value.remedy


async def test_resync_brings_up_any_weights(tmp_path: Path, processes: list[Process]) -> None:
    process = spawn(processes, tmp_path, seed=77)
    base, new = tiny_state(0), next_state(tiny_state(0))
    link = await owner(process)
    dense = body_of(local_target(tmp_path, tiny_metas(), base, None, version=0))
    delta = body_of(local_target(tmp_path, tiny_metas(), new, base))
    with pytest.raises(ReceiverError) as wrong:
        await link.prepare(delta)
    assert wrong.value.code == "wrong-base"
    found = await link.resync([dense, delta])
    assert found.digests == {t.name: t.digest for t in delta.tensors}
    assert not process.ask("status")["ready"], "not before it is finalized"
    await link.finalize(1)
    assert process.ask("status")["ready"]
    assert same(process.weights(), new)
    await link.aclose()


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", (MAX_FRAME_BYTES + 1).to_bytes(4, "little"), b"\x05\0\0\0hello"]
)
async def test_garbage_ends_the_connection_only(tmp_path: Path, garbage: bytes) -> None:
    model = TinyModel()
    with TorchReceiver(model, name="g", run="r", socket_path=tmp_path / "g.sock") as receiver:
        reader, writer = await asyncio.open_unix_connection(str(receiver.socket_path))
        writer.write(garbage)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
        link = await ReceiverClient.connect(receiver.socket_path)
        assert (await link.status()).phase == "clean"
        with pytest.raises(ReceiverError):
            await link.call("nonsense", TargetBody.model_construct(), TargetBody)
        await link.aclose()
    with pytest.raises(ReceiverGone):
        await ReceiverClient.connect(tmp_path / "g.sock")


async def test_the_socket_is_private_and_not_shared(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "p.sock"
    with TorchReceiver(TinyModel(), name="p", run="r", socket_path=path):
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0
        with pytest.raises(InvalidInput, match="another receiver"):
            TorchReceiver(TinyModel(), name="p", run="r", socket_path=path)
    assert not path.exists()


def test_weights_of_a_module() -> None:
    model = TinyModel()
    state = tiny_state(3)
    load(model, state)
    assert same(dump(model), state)
    live = ModuleWeights(model).live()
    by_name = live.select(tiny_metas())
    for name, lanes in state.items():
        copy = by_name[name].copies[0]
        assert by_name[name].digest(name) >= 0
        hit, local = copy.locator.locate(np.arange(lanes.size, dtype=np.int64))
        assert hit.all()
        assert np.array_equal(copy.lanes.gather(local), lanes), name
    renamed = [m.model_copy(update={"name": "lm_head.weight"}) if m.name == "embed.weight" else m for m in tiny_metas()]
    assert live.select(renamed)["lm_head.weight"] is by_name["embed.weight"]


def test_memory_that_cannot_be_written_in_place_is_refused() -> None:
    model = nn.Module()
    model.gaps = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16)[:, ::2])
    with pytest.raises(InvalidInput, match="gaps"):
        ModuleWeights(model).live()
    shared = torch.zeros(10, dtype=torch.bfloat16)
    model = nn.Module()
    model.a, model.b = nn.Parameter(shared[:6]), nn.Parameter(shared[4:])
    with pytest.raises(InvalidInput, match="share"):
        ModuleWeights(model).live()
    with pytest.raises(InvalidInput, match="no tensor"):
        ModuleWeights(TinyModel(), ignore=["nope"])


def test_a_model_on_a_device_is_kept_at_the_versions(tmp_path: Path) -> None:
    """Tied and transposed parameters and an FP32 buffer on a device that the host cannot read, one buffer beside it."""
    model, host = TinyModel(), TinyModel()
    base, new = tiny_state(0), next_state(tiny_state(0))
    load(host, base)
    with pretending():
        model.embed.weight = nn.Parameter(PretendTensor(host.embed.weight.detach()))
        model.lm_head.weight = model.embed.weight
        model.proj.weight = nn.Parameter(PretendTensor(host.proj.weight.detach()))
        model.norm.weight = nn.Parameter(PretendTensor(host.norm.weight.detach()))
        model.router_bias, model.counter = PretendTensor(host.router_bias), host.counter
        core = ReceiverCore(ModuleWeights(model), name="d", run="r")
        core.prepare(p.Prepare(target=body_of(local_target(tmp_path, tiny_metas(), new, base))))
        core.commit(p.Commit(version=1))
        assert same(dump(host), new)
        core.finalize(p.Finalize(version=1))
        assert core.ready, "our own writes are nobody else's"
        with torch.no_grad():
            model.norm.weight.add_(1)
        assert not core.ready
        core.close()


def test_copies_of_an_untied_tensor_are_written_with_it() -> None:
    model = TinyModel()
    model.lm_head.weight = nn.Parameter(model.embed.weight.detach().clone())
    live = ModuleWeights(model, copies={"lm_head.weight": "embed.weight"}).live()
    assert len(live.select(tiny_metas())["embed.weight"].copies) == 2


async def test_the_gate() -> None:
    gate = Gate()
    with pytest.raises(StateConflict):
        gate.enter_read(lambda: False, 0)
    gate.enter_read(lambda: True, 0)
    with pytest.raises(StateConflict):
        gate.enter_write(0)
    gate.leave_read()
    gate.enter_write(0)
    gate.enter_write(0)
    with pytest.raises(StateConflict):
        gate.enter_read(lambda: True, 0)
    gate.leave_write()
    gate.enter_read(lambda: True, 0)


def test_closing_rolls_back(tmp_path: Path) -> None:
    model = TinyModel()
    base, new = tiny_state(0), next_state(tiny_state(0))
    load(model, base)
    core = ReceiverCore(ModuleWeights(model), name="c", run="r")
    from clients.rollout import protocol as p

    core.prepare(p.Prepare(target=body_of(local_target(tmp_path, tiny_metas(), new, base))))
    core.commit(p.Commit(version=1))
    assert same(dump(model), new)
    core.close()
    assert same(dump(model), base)


def test_the_registration_does_not_take_a_proxy_to_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []
    came = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()
            came.set()

        def log_message(self, *_: Any) -> None:
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        model = nn.Linear(2, 2)
        with TorchReceiver(model, name="x", run="r", daemon=url, token="secret-1", socket_path=tmp_path / "x.sock"):
            assert came.wait(60)
        server.shutdown()
    assert asked[0] == ("/receivers", "Bearer secret-1")
