"""The control block: a read that is believed saw one consistent state, whatever the trainer did meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import StateConflict
from transports.memory import shm
from transports.memory.generation import ControlBlock, control_name
from transports.memory.shm import SharedMemoryInvalid

NAME = f"dte-gtest-{os.getpid()}"


@pytest.fixture
def pair() -> Iterator[tuple[ControlBlock, ControlBlock]]:
    """(trainer's side, reader's side)"""
    with ControlBlock.create(f"{NAME}-c") as trainer:
        with ControlBlock.open(trainer.name) as reader:
            yield trainer, reader
        trainer.unlink()


class Protocol(RuleBasedStateMachine):
    """Trainer and reader act in any order. `writes` is what the words must let the reader know."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer = ControlBlock.create(f"{NAME}-machine")
        self.reader = ControlBlock.open(f"{NAME}-machine")
        self.writes = 0  # mutations begun or ended, and revocations
        self.open = 0
        self.read: tuple[int, int, int] | None = None  # generation, hold, writes at its begin

    @rule()
    def begin(self) -> None:
        before = self.trainer.generation
        self.trainer.begin_mutation()
        self.open += 1
        self.writes += self.open == 1
        assert (self.trainer.generation == before) == (self.open > 1)

    @precondition(lambda self: self.open > 0)
    @rule()
    def end(self) -> None:
        self.trainer.end_mutation()
        self.open -= 1
        self.writes += self.open == 0

    @rule()
    def take_hold(self) -> None:
        before = self.trainer.hold_number
        assert self.trainer.hold() == before + 1
        assert not self.trainer.is_released(before + 1)
        self.read = (self.reader.generation, before + 1, self.writes)

    @rule()
    def revoke(self) -> None:
        self.trainer.revoke()
        self.writes += 1
        assert self.trainer.wait_released(self.trainer.hold_number, 0.0)

    @precondition(lambda self: self.read is not None)
    @rule()
    def release(self) -> None:
        assert self.read is not None
        self.reader.release(self.read[1])
        assert self.trainer.wait_released(self.read[1], 0.0)

    @invariant()
    def odd_exactly_while_mutating(self) -> None:
        assert self.reader.generation % 2 == (self.open > 0)

    @invariant()
    def a_read_is_intact_exactly_when_nothing_was_written_since_it_began(self) -> None:
        if self.read is not None:
            generation, hold, writes = self.read
            expected = writes == self.writes and self.open == 0
            assert self.reader.intact(generation, hold) == expected

    @invariant()
    def words_never_go_back(self) -> None:
        now = (self.reader.generation, self.reader.hold_number, self.reader.revoked, self.reader.released)
        before = getattr(self, "before", now)
        assert all(a <= b for a, b in zip(before, now, strict=True))
        self.before = now

    def teardown(self) -> None:
        self.reader.close()
        self.trainer.unlink()
        self.trainer.close()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_waiting_ends_when_the_reader_releases(pair: tuple[ControlBlock, ControlBlock]) -> None:
    trainer, reader = pair
    hold = trainer.hold()
    assert not trainer.wait_released(hold, 0.0)
    thread = threading.Thread(target=reader.release, args=(hold,))
    thread.start()
    assert trainer.wait_released(hold, 60.0)
    thread.join()
    reader.release(hold - 1)  # an older release does not take it back
    assert reader.released == hold


def test_a_revoked_hold_counts_as_released_and_its_read_as_torn(pair: tuple[ControlBlock, ControlBlock]) -> None:
    trainer, reader = pair
    hold, generation = trainer.hold(), trainer.generation
    assert reader.intact(generation, hold)
    trainer.revoke()
    assert trainer.wait_released(hold, 0.0)
    assert not reader.intact(generation, hold)
    assert not reader.intact(trainer.generation, hold)  # not even with the generation of after the revocation
    newer = trainer.hold()
    assert reader.intact(trainer.generation, newer)


def test_end_without_begin_is_refused(pair: tuple[ControlBlock, ControlBlock]) -> None:
    with pytest.raises(StateConflict):
        pair[0].end_mutation()


def test_mutating_ends_when_its_body_raises(pair: tuple[ControlBlock, ControlBlock]) -> None:
    trainer, reader = pair
    odd: list[int] = []

    def body() -> None:
        with trainer.mutating():
            odd.append(reader.generation % 2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        body()
    assert odd == [1]
    assert reader.generation % 2 == 0


def test_other_files_are_no_control_blocks() -> None:
    for size_bytes in (64, 4096):
        with shm.allocate(f"{NAME}-no", size_bytes) as file:
            with pytest.raises(SharedMemoryInvalid, match="not a control block"):
                ControlBlock.open(file.name)
            file.unlink()


def test_names_stay_valid_for_the_longest_ids() -> None:
    shm.check_name(control_name("r" * 128, "l" * 64, 1 << 20))


READER = """
import sys
from transports.memory import shm
from transports.memory.generation import ControlBlock
control, data = ControlBlock.open(sys.argv[1]), shm.open_existing(sys.argv[2])
words = data.tensor(0, 4096, "int64")
believed = torn = 0
while True:
    generation, hold = control.generation, control.hold_number
    first = words.clone()
    if control.intact(generation, hold):
        believed += 1
        if int(first.min()) != int(first.max()):
            sys.exit(f"believed a torn read: {first.unique().tolist()}")
        if int(first[0]) == -1:
            break
    else:
        torn += 1
    control.release(hold)
print(believed, torn)
"""


def test_two_processes_never_believe_a_torn_read() -> None:
    """A reader in a process of its own reads without pause while the trainer, holding or not, rewrites everything."""
    with ControlBlock.create(f"{NAME}-p") as control, shm.allocate(f"{NAME}-d", 8 * 4096) as data:
        words = data.tensor(0, 4096, "int64")
        control.hold()
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, control.name, data.name], stdout=subprocess.PIPE, text=True
        )
        try:
            assert control.wait_released(1, 120.0)  # the reader runs
            for n in range(1, 4000):
                with control.mutating():
                    words.fill_(n)
                if n % 500 == 0:
                    assert control.wait_released(control.hold(), 120.0)
            with control.mutating():
                words.fill_(-1)
            out, _ = reader.communicate(timeout=120)
        finally:
            reader.kill()
            control.unlink()
            data.unlink()
        assert reader.returncode == 0
        believed, torn = map(int, out.split())
        assert believed > 0
        assert torn > 0  # else the race was never run
