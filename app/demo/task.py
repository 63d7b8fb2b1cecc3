"""The demo's RL task: add two two-digit numbers. Prompts, rewards, and nothing about training.

Invariant: the same seed yields the same sequence of problems.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_SHOTS = "12+25=37\n31+54=85\n"


@dataclass(frozen=True)
class Problem:
    """One prompt and its right answer."""

    prompt: str
    answer: int


class Addition:
    """An endless, seeded stream of problems."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> Problem:
        a, b = self._random.randint(11, 99), self._random.randint(11, 99)
        return Problem(f"{_SHOTS}{a}+{b}=", a + b)


def reward(completion: str, answer: int) -> float:
    """1 for the right number on the first line, up to 0.3 for one close to it, and 0.1 for ending the line after it.

    The partial rewards give a small model a slope to climb before it gets a sum right.
    """
    line, newline, _ = completion.partition("\n")
    score = 0.1 if newline else 0.0
    number = re.match(r"\s*(\d+)", line)
    if number is None:
        return score
    distance = abs(int(number[1]) - answer)
    return score + (1.0 if distance == 0 else 0.3 * max(0.0, 1 - distance / 50))
