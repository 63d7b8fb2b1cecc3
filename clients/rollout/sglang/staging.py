"""Canonical tensors out of a file that the daemon has written for a converter unit.

One invariant: what is handed out is mapped privately from a regular file of this user and has the digests it was
announced with; nothing that happens to the file's name afterwards changes it.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from clients.rollout.sglang.call import UnitTensor
from engine.apply import lane_count
from engine.digest import DigestKey, digest_array, to_hex
from engine.errors import CodecError, InvalidInput, ProofError
from engine.records.models import ITEMSIZE

_TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def map_unit(path: str, tensors: Sequence[UnitTensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names they were announced with; their pages are the file's, read when they are needed.

    CodecError if the file is not what it should be, ProofError if a digest is another, InvalidInput for a dtype that
    cannot be loaded.
    """
    if not tensors:
        return {}
    mapped = _map(Path(path))
    out = {}
    for t in tensors:
        lanes = lane_count(t.shape, t.dtype)
        if t.offset % ITEMSIZE[t.dtype] or t.offset + 2 * lanes > len(mapped):
            raise CodecError(f"{t.name!r} does not lie in the {len(mapped)} bytes of its file.")
        if t.dtype not in _TORCH:
            raise InvalidInput(f"tensors of {t.dtype} such as {t.name!r} are not converted.")
        words = np.frombuffer(mapped, np.uint16, lanes, t.offset)
        found = to_hex(digest_array(DigestKey.for_tensor(t.name), words))
        if found != t.digest:
            raise ProofError(f"{t.name!r} has the digest {found} in its file; announced is {t.digest}.")
        out[t.name] = torch.from_numpy(words.view(np.uint8)).view(_TORCH[t.dtype]).reshape(tuple(t.shape))
    return out


def _map(path: Path) -> mmap.mmap:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CodecError(f"{path.name} cannot be opened: {error.strerror}.") from None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in (os.geteuid(), 0) or about.st_size == 0:
            raise CodecError(f"{path.name} is not a regular file of this user.")
        # Private and writable: a loader that wrote to what it was given would write to its own copy.
        return mmap.mmap(handle, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(handle)
