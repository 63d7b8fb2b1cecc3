"""`ControlBlock`: the few shared words by which a trainer and a reading worker agree when memory may be read.

One invariant: if a reader saw the same even generation before and after its read, and its hold was not revoked, then
nobody announced a write to the memory in between, so what was read is one consistent state.

Words (64 bits, little-endian, each on its own cache line):

    magic        fixed
    generation   written by the trainer; odd while it mutates, grows by 2 per mutation or revocation (a seqlock)
    hold         written by the trainer; the number of the newest hold
    revoked      written by the trainer; the newest hold that was taken back
    released     written by the reader; the newest hold it no longer needs

Every word has exactly one writer, so no read-modify-write has to be atomic; aligned 8-byte loads and stores are.
Memory ordering: a full fence stands between a word and the data it guards, on both sides (`_Fence`). In a seqlock the
odd store must be visible before any data store, the data stores before the even store, and the reader's loads must
stay between its two loads of the word.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from engine.errors import StateConflict
from transports.memory.shm import SharedMemoryInvalid, ShmFile, allocate, open_existing

_MAGIC: Final = int.from_bytes(b"DTECTRL1", "little")
_LINE_WORDS: Final = 8
_SIZE_BYTES: Final = 4096
_W_MAGIC, _W_GENERATION, _W_HOLD, _W_REVOKED, _W_RELEASED = (i * _LINE_WORDS for i in range(5))

_POLL_MIN_S: Final = 0.0001
_POLL_MAX_S: Final = 0.002


class _Fence:
    """A full memory fence out of what the standard library has.

    Releasing and taking a semaphore-backed lock is a store-release followed by a load-acquire of one word, which orders
    everything before against everything after on x86-64 and on AArch64.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        with self._mutex:
            self._lock.release()
            self._lock.acquire()


class ControlBlock:
    """The shared words of one trainer rank. `create` on the trainer's side, `open` on the reader's."""

    def __init__(self, file: ShmFile) -> None:
        """Use `create` or `open` instead."""
        self._file = file
        self._words: memoryview = memoryview(file.buffer()).cast("Q")
        self._fence = _Fence()
        self._mutex = threading.RLock()
        self._depth = 0

    @classmethod
    def create(cls, name: str) -> ControlBlock:
        """Allocate the block; the caller is the trainer and the only writer of all words but `released`."""
        block = cls(allocate(name, _SIZE_BYTES))
        block._words[_W_MAGIC] = _MAGIC
        return block

    @classmethod
    def open(cls, name: str) -> ControlBlock:
        """Map an existing block as its reader. SharedMemoryInvalid if the file is not a control block."""
        file = open_existing(name, writable=True)
        try:
            if file.size_bytes != _SIZE_BYTES:
                raise SharedMemoryInvalid(f"{name} is not a control block: {file.size_bytes} bytes.")
            block = cls(file)
            if block._words[_W_MAGIC] != _MAGIC:
                block._words.release()
                raise SharedMemoryInvalid(f"{name} is not a control block of this version.")
            return block
        except BaseException:
            file.close()
            raise

    @property
    def name(self) -> str:
        """The shared memory name."""
        return self._file.name

    # --- words, readable from both sides ---------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The generation now; odd while the trainer mutates. Fenced on both sides: usable around a read."""
        return self._load(_W_GENERATION)

    @property
    def hold_number(self) -> int:
        """The newest hold taken (0: none yet)."""
        return self._load(_W_HOLD)

    @property
    def revoked(self) -> int:
        """The newest hold that was taken back (0: none). Holds are taken one at a time, so older ones are over too."""
        return self._load(_W_REVOKED)

    @property
    def released(self) -> int:
        """The newest hold the reader gave back (0: none)."""
        return self._load(_W_RELEASED)

    # --- the reader ------------------------------------------------------------------------------------------------

    def intact(self, generation: int, hold: int) -> bool:
        """Whether a read that began at `generation` under `hold` may be believed so far. Call it after the read too."""
        return generation % 2 == 0 and self.generation == generation and self.revoked < hold

    def release(self, hold: int) -> None:
        """Tell the trainer that the reader is done with `hold`. Only the reader calls this."""
        if hold > self._load(_W_RELEASED):
            self._store(_W_RELEASED, hold)

    def owner_alive(self) -> bool:
        """Whether the trainer process still lives (it holds the file's lock)."""
        return self._file.owner_alive()

    # --- the trainer -----------------------------------------------------------------------------------------------

    def begin_mutation(self) -> None:
        """Announce that memory is about to change. Nests; the outermost call makes the generation odd."""
        with self._mutex:
            self._depth += 1
            if self._depth == 1:
                self._store(_W_GENERATION, self._words[_W_GENERATION] + 1)

    def end_mutation(self) -> None:
        """End what `begin_mutation` began; the outermost call makes the generation even again."""
        with self._mutex:
            if self._depth == 0:
                raise StateConflict("end_mutation without begin_mutation.")
            self._depth -= 1
            if self._depth == 0:
                self._store(_W_GENERATION, self._words[_W_GENERATION] + 1)

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """`with block.mutating(): …` around any write to, or move of, the shared memory."""
        self.begin_mutation()
        try:
            yield
        finally:
            self.end_mutation()

    def hold(self) -> int:
        """Take the next hold: from now the trainer waits for its release before it mutates. Returns its number."""
        with self._mutex:
            number: int = self._words[_W_HOLD] + 1
            self._store(_W_HOLD, number)
            return number

    def is_released(self, hold: int) -> bool:
        """Whether `hold` was released by the reader or revoked."""
        return self.released >= hold or self.revoked >= hold

    def wait_released(self, hold: int, timeout_s: float) -> bool:
        """Wait until `hold` is released or revoked. False if `timeout_s` passed first."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = _POLL_MIN_S
        while not self.is_released(hold):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        return True

    def revoke(self) -> None:
        """Take back every hold so far: the reader's running read becomes worthless, the trainer may go on."""
        with self._mutex:
            self._store(_W_REVOKED, self._words[_W_HOLD])
            self._store(_W_GENERATION, self._words[_W_GENERATION] + 2)

    # --- life ------------------------------------------------------------------------------------------------------

    def unlink(self) -> None:
        """Remove the name (trainer)."""
        self._file.unlink()

    def close(self) -> None:
        """Give up the mapping. Idempotent."""
        self._words.release()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, word: int) -> int:
        self._fence()
        value: int = self._words[word]
        self._fence()
        return value

    def _store(self, word: int, value: int) -> None:
        self._fence()
        self._words[word] = value
        self._fence()


def control_name(run: str, launch: str, rank: int) -> str:
    """The name of a rank's control block. Run and launch are cut so that the whole stays a valid file name."""
    return shm_name(run, launch, rank, "control")


def shm_name(run: str, launch: str, rank: int, part: str) -> str:
    """`dte-<run>-<launch>-<rank>-<pid>-<part>`, unique per process and launch, at most 200 characters."""
    return f"dte-{run[:64]}-{launch[:64]}-{rank}-{os.getpid()}-{part}"
