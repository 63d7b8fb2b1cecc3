"""Real Megatron-Core ranks that are killed, and node daemons that are killed under ranks that train on.

Whatever happens: no version is half of one, the chain goes on, and the receiver ends with the dense gather bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.megatron.crew import Crew, MegatronNodes
from tests.support.kept import Kept
from tests.support.megatron.job import Job
from tests.support.megatron.launch import Rig

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SHAPES: dict[str, tuple[int, Job]] = {
    "dp2": (2, Job(family="qwen3")),
    "pp2-tied": (2, Job(family="llama", pp=2, tied=True)),
    "tp2-dp2": (4, Job(family="qwen3", tp=2)),
    "ep2-tp2": (4, Job(family="qwen3_moe", ep=2, tp=2, sp=True)),
}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept[MegatronNodes]]:
    found = Kept(lambda: MegatronNodes(tmp_path_factory.mktemp("nodes")))
    yield found
    found.end()


@pytest.fixture
def begin(kept: Kept[MegatronNodes], rig: Rig, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Crew]]:
    """Start ranks of a shape, with one version that has arrived."""
    made: list[Crew] = []
    with kept.lend(request) as nodes:

        def start(shape: str) -> Crew:
            made.append(Crew(rig, nodes, f"faults-{next(_numbers)}", *SHAPES[shape]))
            made[-1].launch()
            made[-1].settle()
            return made[-1]

        yield start
        for crew in made:
            crew.close()


def finish(crew: Crew) -> None:
    """Two more versions arrive; the second one is sparse again, whatever the first one had to make up for."""
    crew.settle()
    assert crew.settle().dense_tiles == 0
    crew.check()
    crew.end()


@pytest.mark.parametrize(
    ("shape", "back", "node"),
    [("dp2", 0, "daemon-lives"), ("tp2-dp2", 1, "node-lost")],
    ids=["dp2-daemon-lives", "tp2-dp2-older-checkpoint-node-lost"],
)
def test_a_writer_dies_before_it_has_reported(
    begin: Callable[[str], Crew], tmp_path: Path, shape: str, back: int, node: str
) -> None:
    """The others have reported their parts. A relaunch goes on from the checkpoint, at the head or before it."""
    crew = begin(shape)
    nodes, checkpoint = crew.nodes, str(tmp_path / "checkpoint")
    crew.ask("save", folder=checkpoint)
    said = crew.ask("flush")
    head = crew.arrived(said)
    if not back:
        crew.ask("save", folder=checkpoint)
    nodes.until("the head is known", lambda: crew.follower.control.versions().head == head.version)
    version = nodes.next_number()
    crew.tell("train", ends=1)
    assert crew.session.hear(1) == {"agreed": version}
    others = [rank for rank in range(crew.world) if rank != 1]
    assert [crew.session.hear(rank)["version"] for rank in others] == [version] * len(others)
    nodes.until("the others' parts", lambda: len(nodes.part_writers(version)) == len(others))
    crew.die(1)
    if node == "node-lost":
        nodes.kill_daemon(1)
        nodes.wipe(1)
    assert nodes.decision(version) is None
    # The receiver has downloaded what it could, and holds what it held.
    crew.follower.compare(crew.job, said | {"state": "undecided"})
    assert crew.follower.control.versions().head == head.version
    if node == "node-lost":
        nodes.start_daemon(1)
    epoch = crew.launch(checkpoint)["epoch"]
    assert epoch == 2
    taken = nodes.decision(version)
    assert taken is not None
    assert (taken["kind"], taken["base"]) == ("epoch-start", head.version)
    finish(crew)
    later = [v for v in crew.follower.control.versions().versions if v.epoch == epoch]
    assert later[0].base == head.version
    assert [v.rewound for v in later] == [bool(back)] + [False] * (len(later) - 1)
    if not back:
        assert [v.dense_tiles for v in later] == [0] * len(later), "the checkpoint is the head: deltas go on"


@pytest.mark.parametrize("shape", ["pp2-tied"])
def test_all_die_before_a_complete_version_is_decided(begin: Callable[[str], Crew], tmp_path: Path, shape: str) -> None:
    """The relaunch adopts it, and goes on from it with deltas."""
    crew = begin(shape)
    nodes, checkpoint = crew.nodes, str(tmp_path / "checkpoint")
    hold = nodes.hold_decision(every=True)
    said = crew.publish_step()
    hold.wait()
    version = said["version"]
    crew.ask("save", folder=checkpoint)
    crew.die(*range(crew.world))
    for number in nodes.daemons:
        nodes.kill_daemon(number)
    hold.lose()
    nodes.clear_holds()
    assert nodes.decision(version) is None
    nodes.start_daemons(2)
    assert crew.launch(checkpoint)["epoch"] == 2
    taken = nodes.decision(version)
    assert taken is not None
    assert (taken["kind"], taken["epoch"], taken["step"]) == ("commit", 1, said["step"])
    crew.arrived(said)
    finish(crew)
    later = [v for v in crew.follower.control.versions().versions if v.epoch == 2]
    assert later[0].base == version
    assert not any(v.rewound or v.dense_tiles for v in later)


@pytest.mark.parametrize(("shape", "number"), [("tp2-dp2", 0)])
def test_a_node_daemon_dies_between_steps(begin: Callable[[str], Crew], shape: str, number: int) -> None:
    """Its ranks train on without it for some steps. What they did then goes out once it is back."""
    crew = begin(shape)
    crew.nodes.kill_daemon(number)
    for _ in range(2):
        crew.tell("train")
        posted = [a["posted"] for a in crew.answers()]
        assert posted == [rank % 2 != number for rank in range(crew.world)]
    crew.nodes.restart_daemon(number)
    finish(crew)


def test_node_daemons_that_are_away_while_nothing_is_read_leave_no_trace(begin: Callable[[str], Crew]) -> None:
    crew = begin("dp2")
    for number in range(2):
        crew.nodes.kill_daemon(number)
    crew.nodes.restart_all()
    assert crew.settle().dense_tiles == 0
    crew.check()
    crew.end()


MOMENTS = {"before-a-chunk": (r"/chunks/", False), "before-its-part": (r"/parts/", False), "after": (r"/parts/", True)}


@pytest.mark.parametrize(
    ("shape", "number", "moment"),
    [("dp2", 0, "before-a-chunk"), ("pp2-tied", 1, "after")],
)
def test_a_node_daemon_dies_in_the_middle_of_a_publication(
    begin: Callable[[str], Crew], shape: str, number: int, moment: str
) -> None:
    """The version it was at becomes one once the daemon is back, and nothing of later steps is missed."""
    crew = begin(shape)
    nodes, (path, after) = crew.nodes, MOMENTS[moment]
    hold = nodes.hold("PUT", path, at=[number], after=after)
    version = crew.publish_step()["version"]
    hold.wait()
    nodes.kill_daemon(number)
    hold.lose()
    for _ in range(2):
        crew.ask("train")
    nodes.restart_daemon(number)
    taken = nodes.until("the version in flight is decided", lambda: nodes.decision(version))
    assert taken["kind"] == "commit"
    finish(crew)
