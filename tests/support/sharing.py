"""How the test suite is shared out between processes, for pytest-xdist with `--dist loadgroup`.

One invariant: tests that share something expensive, or must not run at once, are one group, and a group runs in one
process. A group is a module; what is named here is an exception. Names of tests stay as they are, so that
`--last-failed` finds them in a run of one process, too.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

# Whole packages in one process: what they share takes long to start. Two SGLang servers would also share pinned cores.
TOGETHER = {
    "tests/sglang/": "sglang",
    "tests/clients/test_sglang_layouts.py": "sglang",
    "tests/megatron/": "megatron",
    "tests/fsdp/": "fsdp",
}
# Their tests take long and share nothing, or what is cheap to have in both processes: one group each.
ONE_BY_ONE = (
    "tests/faults/",
    "tests/e2e/test_models.py",
    "tests/e2e/test_optimizers.py",
    "tests/e2e/test_life.py",
    "tests/app/test_publisher_faults.py",
    "tests/app/test_subscriber_faults.py",
    "tests/p2p/test_faults.py",
)
# What takes longest starts first, so that both processes end at about the same time.
FIRST = (
    *TOGETHER,
    "tests/faults/",
    "tests/p2p/",
    "tests/transports/p2p/",
    "tests/model/",
    "tests/app/test_publisher_faults.py",
    "tests/e2e/",
)


def group(nodeid: str) -> str:
    """Tests with the same answer run in one process, in their order."""
    for start, name in TOGETHER.items():
        if nodeid.startswith(start):
            return name
    return nodeid if nodeid.startswith(ONE_BY_ONE) else nodeid.partition("::")[0]


def rank(nodeid: str) -> int:
    """The place of a test among the others; equal ones stay in their order."""
    return next((n for n, start in enumerate(FIRST) if nodeid.startswith(start)), len(FIRST))


class Groups(LoadScopeScheduling):
    """Hands out whole groups, in the order of their first tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    return sorted(items, key=lambda item: rank(item.nodeid))
