"""Processes forked from a trainer (data loaders, evaluation) and trainers that end without a word."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from clients.trainer import TorchSource
from engine.errors import StateConflict
from tests.clients.trainer_double import FakeDaemon

SCRIPT = """
import os, sys, torch
from tests.clients.trainer_double import FakeDaemon
from clients.trainer import TorchSource
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
source = TorchSource(model, optimizer, run=sys.argv[1], transport=FakeDaemon().transport)
source.register()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
names = [n for n in os.listdir("/dev/shm") if n.startswith(f"dte-{sys.argv[1]}-")]
for p in model.parameters():
    p.grad = torch.ones_like(p)
optimizer.step()
source.sync(1)
print(len(names), source.stats.syncs, flush=True)
"""


def in_a_fork(work: Callable[[], None]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    child.kill()
    return child.exitcode


def test_a_fork_does_not_speak_for_the_trainer() -> None:
    daemon = FakeDaemon()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with TorchSource(model, optimizer, run="fork", transport=daemon.transport) as source:
        assert len(list(DataLoader(torch.randn(8, 8), batch_size=4, num_workers=2))) == 2  # type: ignore[arg-type]
        block = Path("/dev/shm") / daemon.registration.control  # type: ignore[union-attr]
        words = block.read_bytes()

        def work() -> None:
            with pytest.raises(StateConflict, match="forked from the trainer"):
                source.sync(1)
            with pytest.raises(StateConflict, match="forked from the trainer"), source.mutating():
                pass
            for p in model.parameters():
                p.grad = None
            optimizer.step()  # the hooks must leave the words alone; without gradients nothing is written
            source.close()

        assert in_a_fork(work) == 0
        assert block.read_bytes() == words
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        source.sync(1)
        assert source.stats.syncs == 1
    assert not block.exists()
    daemon.close()


@pytest.mark.slow
def test_a_fork_that_exits_and_a_trainer_that_never_closes_leave_the_right_files() -> None:
    run = f"unclosed-{os.getpid()}"
    found = subprocess.run([sys.executable, "-c", SCRIPT, run], capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["2", "1"], found.stderr
    left = [f.name for f in Path("/dev/shm").iterdir() if f.name.startswith(f"dte-{run}-")]
    assert all("control" in name for name in left), left
