"""Shared memory files: what may be opened, what is left behind, and that a mapping outlives its name."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transports.memory import shm
from transports.memory.shm import SharedMemoryError, SharedMemoryFull, SharedMemoryInvalid, ShmFile

NAME = f"dte-test-{os.getpid()}"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in os.listdir(shm.SHM_DIR):
        if name.startswith(NAME):
            (shm.SHM_DIR / name).unlink()


@pytest.fixture
def file() -> Iterator[ShmFile]:
    made = shm.allocate(f"{NAME}-a", 4096)
    yield made
    made.unlink()
    made.close()


def test_owner_and_reader_see_the_same_bytes_without_a_copy(file: ShmFile) -> None:
    written = file.tensor(64, 10, torch.float32)
    with shm.open_existing(file.name) as other:
        seen = other.tensor(64, 10, "float32")
        written.copy_(torch.arange(10.0))
        assert seen.tolist() == list(range(10))
        assert other.tensor(64, 20, "bfloat16").view(torch.float32)[3] == 3.0
        assert other.size_bytes == 4096


def test_tensors_outlive_close_and_unlink(file: ShmFile) -> None:
    tensor = file.tensor(0, 1024, torch.float32).fill_(7.0)
    file.unlink()
    file.unlink()
    file.close()
    file.close()
    gc.collect()
    tensor += 1
    assert tensor.eq(8.0).all()
    with pytest.raises(SharedMemoryError, match="closed"):
        file.tensor(0, 1, torch.float32)
    with pytest.raises(SharedMemoryInvalid, match="no shared memory file"):
        shm.open_existing(file.name)


def test_unlink_spares_a_newer_file_of_the_same_name(file: ShmFile) -> None:
    (shm.SHM_DIR / file.name).unlink()
    with shm.allocate(file.name, 64) as newer:
        file.unlink()
        assert (shm.SHM_DIR / file.name).exists()
        newer.unlink()
    assert not (shm.SHM_DIR / file.name).exists()


def test_files_are_private_and_fully_reserved(file: ShmFile) -> None:
    info = os.stat(shm.SHM_DIR / file.name)
    assert info.st_mode & 0o777 == 0o600
    assert info.st_blocks * 512 >= file.size_bytes


@pytest.mark.parametrize(
    "name", ["", "dte-", "other", "dte-a/b", "dte-../x", "/dev/shm/dte-a", "dte-a\0b", "dte-ä", "dte-" + "a" * 201]
)
def test_foreign_names_are_refused(name: str) -> None:
    with pytest.raises(SharedMemoryInvalid, match="not a valid"):
        shm.open_existing(name)
    with pytest.raises(SharedMemoryInvalid, match="not a valid"):
        shm.allocate(name, 64)


def test_links_directories_pipes_and_empty_files_are_refused(file: ShmFile) -> None:
    path = shm.SHM_DIR / f"{NAME}-odd"
    path.symlink_to(shm.SHM_DIR / file.name)
    with pytest.raises(SharedMemoryInvalid, match="cannot be opened"):
        shm.open_existing(path.name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SharedMemoryInvalid, match="not a plain file"):
        shm.open_existing(path.name)
    path.unlink()
    path.touch()
    with pytest.raises(SharedMemoryInvalid, match="empty"):
        shm.open_existing(path.name)
    path.unlink()
    path.mkdir()
    with pytest.raises(SharedMemoryInvalid):
        shm.open_existing(path.name)
    path.rmdir()


def test_another_users_file_is_refused(file: ShmFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(SharedMemoryInvalid, match="another user"):
        shm.open_existing(file.name)
    assert shm.remove_stale(NAME) == []


@given(offset=st.integers(-8, 5000), numel=st.integers(-2, 5000), dtype=st.sampled_from(sorted(shm.DTYPES)))
def test_a_reference_is_inside_the_file_and_aligned_or_refused(offset: int, numel: int, dtype: str) -> None:
    item = shm.DTYPES[dtype].itemsize
    file = shm.allocate(f"{NAME}-h", 4096)
    try:
        fits = offset >= 0 and numel >= 0 and offset % item == 0 and offset + numel * item <= 4096
        if fits:
            tensor = file.tensor(offset, numel, dtype)
            assert (tensor.numel(), tensor.dtype) == (numel, shm.DTYPES[dtype])
            assert numel == 0 or tensor.data_ptr() % item == 0
        else:
            with pytest.raises(SharedMemoryInvalid):
                file.tensor(offset, numel, dtype)
    finally:
        file.unlink()
        file.close()


def test_unknown_dtypes_and_empty_files_are_refused(file: ShmFile) -> None:
    with pytest.raises(SharedMemoryInvalid, match="unknown dtype"):
        file.tensor(0, 1, "complex64")
    with pytest.raises(SharedMemoryInvalid, match="at least 1 byte"):
        shm.allocate(f"{NAME}-b", 0)


def test_no_room_says_so_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SharedMemoryFull, match="shm-size"):
        shm.allocate(f"{NAME}-big", 1 << 60)
    assert not (shm.SHM_DIR / f"{NAME}-big").exists()

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SharedMemoryFull):
        shm.allocate(f"{NAME}-big", 4096)
    assert not (shm.SHM_DIR / f"{NAME}-big").exists()


def test_a_name_in_use_is_refused_and_a_dead_ones_is_reused(file: ShmFile) -> None:
    with pytest.raises(SharedMemoryInvalid, match="in use by a living process"):
        shm.allocate(file.name, 64)
    assert shm.remove_stale(NAME) == []
    name = f"{NAME}-dead"
    _die_after(f"shm.allocate({name!r}, 64)")
    with shm.open_existing(name) as left:
        assert not left.owner_alive()
    with shm.allocate(name, 128) as again, shm.open_existing(name) as seen:
        assert seen.owner_alive()
        assert again.owner_alive()
        assert seen.size_bytes == 128
        again.unlink()


def test_a_cleaner_between_create_and_lock_does_not_leave_the_owner_without_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, real, stolen = f"{NAME}-race", fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not stolen:
            stolen.append(shm.remove_stale(name))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with shm.allocate(name, 64) as file:
        assert stolen == [[name]]
        with shm.open_existing(name) as seen:
            assert seen.owner_alive()
        file.unlink()


def test_only_files_of_dead_owners_are_stale(file: ShmFile) -> None:
    dead = [f"{NAME}-x{i}" for i in range(3)]
    _die_after(*(f"shm.allocate({n!r}, 64)" for n in dead))
    (shm.SHM_DIR / f"{NAME}-link").symlink_to(shm.SHM_DIR / file.name)
    assert shm.remove_stale(NAME) == dead
    assert (shm.SHM_DIR / file.name).exists()
    assert shm.remove_stale(NAME) == []


def _die_after(*statements: str) -> None:
    """Run statements in a process of its own that is killed without a chance to clean up."""
    kept = "; ".join(f"k{i} = {s}" for i, s in enumerate(statements))
    code = f"import os, signal; from transports.memory import shm; {kept}; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == -9
