"""How the tests are shared out between processes: what is named is there, and nobody's ports are another's."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("xdist")

from tests.support import sharing
from tests.support.ports import END, FIRST, free_port, ports_of

ROOT = Path(__file__).parent.parent


def test_what_is_named_is_there() -> None:
    for name in (*sharing.TOGETHER, *sharing.ONE_BY_ONE, *sharing.FIRST):
        assert (ROOT / name).exists(), name


def test_a_module_is_a_group_unless_it_is_named() -> None:
    one, other = "tests/app/test_demo.py::test_a[x::y]", "tests/app/test_demo.py::test_b"
    assert sharing.group(one) == sharing.group(other) == "tests/app/test_demo.py"
    one, other = "tests/faults/test_kills.py::test_a[b/c]", "tests/faults/test_kills.py::test_a[b/d]"
    assert sharing.group(one) != sharing.group(other)
    one, other = "tests/sglang/test_ranks.py::test_a", "tests/sglang/test_follow.py::test_a"
    assert sharing.group(one) == sharing.group(other) != sharing.group("tests/app/test_sglang_engine.py::test_a")


@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_every_process_has_ports_of_its_own(workers: int) -> None:
    ranges = [set(ports_of(n, workers)) for n in range(workers)]
    assert not any(a & b for a, b in combinations(ranges, 2))
    assert all(FIRST <= port < END for ports in ranges for port in ports)


def test_no_port_is_handed_out_twice() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
