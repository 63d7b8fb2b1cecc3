"""Ranks of one trainer agree through torch.distributed: one launch id, the smallest cut. Real processes on Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from clients.trainer.group import default_agree, new_launch, rank_and_world

RANK = """
import json
import sys
import torch.distributed as dist
from clients.trainer.group import default_agree, new_launch, rank_and_world
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
pair = dist.new_group([1, 2])
answers = [new_launch(), default_agree()(7 if rank else 5), default_agree()(rank - 1), rank_and_world()]
if rank:
    answers += [new_launch(pair), default_agree(pair)(10 + rank), rank_and_world(pair)]
print(json.dumps(answers))
dist.destroy_process_group()
"""


def test_ranks_agree_on_a_launch_and_on_the_smallest_cut(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path / "rendezvous")], stdout=subprocess.PIPE, text=True)
        for r in range(3)
    ]
    try:
        answers = [json.loads(p.communicate(timeout=300)[0]) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    launch = answers[0][0]
    assert len(launch) == 24
    assert [a[:3] for a in answers] == [[launch, 5, -1]] * 3
    assert [a[3] for a in answers] == [[0, 3], [1, 3], [2, 3]]
    assert answers[1][4] == answers[2][4] != launch
    assert [a[5:] for a in answers[1:]] == [[11, [0, 2]], [11, [1, 2]]]


def test_a_single_rank_needs_no_group() -> None:
    assert rank_and_world() == (0, 1)
    assert default_agree()(4) == 4
    assert new_launch() != new_launch()
