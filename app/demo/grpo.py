"""A small GRPO loop with PPO clipping: collect rollouts from whoever holds the policy, take optimizer steps.

The parameters are FP32 and trained in place; rollouts come from outside through a callback, because in this system
the policy that generates lives in another process. Invariant: the learning rate of the very first optimizer step is
exactly 0 (a linear warm-up, as trainers have it), so the first sync has nothing to publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from app.demo.task import Addition, reward

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase


@dataclass(frozen=True)
class GrpoSettings:
    """Sizes and hyperparameters of the run. One update uses `prompts` × `samples` completions."""

    prompts: int = 4
    samples: int = 4
    max_new_tokens: int = 5
    minibatches: int = 1
    lr: float = 5e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    clip_ratio: float = 0.2
    warmup_steps: int = 2

    @property
    def batch(self) -> int:
        return self.prompts * self.samples


@dataclass(frozen=True)
class GenerateRequest:
    """Prompts as token ids, each to be completed once; sampled at temperature 1 from `seed`."""

    prompts: list[list[int]]
    max_new_tokens: int
    seed: int


Generate = Callable[[GenerateRequest], list[list[int]]]


@dataclass(frozen=True)
class Rollout:
    """Right-padded sequences [B, L], which of their tokens were generated [B, L], and per-sequence advantage [B]."""

    tokens: torch.Tensor
    attention: torch.Tensor
    generated: torch.Tensor
    advantage: torch.Tensor
    mean_reward: float
    sample: str


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did. `lr` is the one it used."""

    step: int
    lr: float
    loss: float
    grad_norm: float


class Grpo:
    """Owns the optimizer and the schedule of one run."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        settings: GrpoSettings,
        *,
        seed: int,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.model = model
        self.settings = settings
        self.optimizer = optimizer
        self.step_count = 0
        self._tokenizer = tokenizer
        self._task = Addition(seed)
        self._shuffle = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._rollouts = 0

    def collect(self, generate: Generate) -> Rollout:
        """Draw problems, have each completed `samples` times, score them, normalise rewards within each group."""
        s = self.settings
        problems = [self._task.next() for _ in range(s.prompts)]
        prompts = [
            self._tokenizer(p.prompt, add_special_tokens=False).input_ids for p in problems for _ in range(s.samples)
        ]
        self._rollouts += 1
        seed = self._seed * 1_000_003 + self._rollouts
        completions = generate(GenerateRequest(prompts, s.max_new_tokens, seed))
        if len(completions) != s.batch or any(not 1 <= len(c) <= s.max_new_tokens for c in completions):
            raise ValueError("a receiver answered with completions of the wrong number or length")
        texts = [str(self._tokenizer.decode(c)) for c in completions]
        rewards = torch.tensor([reward(t, problems[i // s.samples].answer) for i, t in enumerate(texts)])
        groups = rewards.view(s.prompts, s.samples)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        tokens, attention, generated = _pad(prompts, completions)
        sample = problems[0].prompt.splitlines()[-1] + texts[0].splitlines()[0] if texts[0] else ""
        return Rollout(tokens, attention, generated, advantage.reshape(-1), float(rewards.mean()), sample)

    def update(self, rollout: Rollout) -> Iterator[StepStats]:
        """Take `minibatches` optimizer steps on the rollout, yielding after each so that the caller can sync."""
        s = self.settings
        old: torch.Tensor | None = None
        if s.minibatches > 1:
            with torch.no_grad():
                old = self._log_probs(rollout, torch.arange(s.batch))
        order = torch.randperm(s.batch, generator=self._shuffle)
        for part in order.chunk(s.minibatches):
            log_probs = self._log_probs(rollout, part)
            reference = log_probs.detach() if old is None else old[part]
            ratio = (log_probs - reference).exp()
            advantage = rollout.advantage[part, None]
            clipped = ratio.clamp(1 - s.clip_ratio, 1 + s.clip_ratio)
            mask = rollout.generated[part, 1:]
            objective = torch.minimum(ratio * advantage, clipped * advantage) * mask
            loss = -objective.sum() / mask.sum()
            yield self._step(loss)

    def _step(self, loss: torch.Tensor) -> StepStats:
        s = self.settings
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.max_grad_norm)
        lr = s.lr * min(1.0, self.step_count / s.warmup_steps) if s.warmup_steps else s.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
        return StepStats(self.step_count, lr, float(loss.detach()), float(norm))

    def _log_probs(self, rollout: Rollout, rows: torch.Tensor) -> torch.Tensor:
        """Log-probability of each next token, [len(rows), L-1]; only generated positions are meaningful."""
        tokens = rollout.tokens[rows]
        hidden = self.model.model(input_ids=tokens, attention_mask=rollout.attention[rows]).last_hidden_state
        mask = rollout.generated[rows, 1:]
        # The vocabulary is far wider than the model: compute logits at generated positions only.
        logits = self.model.lm_head(hidden[:, :-1][mask])
        picked = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:][mask].unsqueeze(-1)).squeeze(-1)
        out = torch.zeros(mask.shape, dtype=picked.dtype)
        return out.masked_scatter(mask, picked)


def _pad(prompts: list[list[int]], completions: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-pad prompt + completion; returns (tokens, attention mask, generated mask)."""
    length = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    tokens = torch.zeros(len(prompts), length, dtype=torch.long)
    attention = torch.zeros(len(prompts), length, dtype=torch.long)
    generated = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        tokens[row, :end] = torch.tensor(prompt + completion)
        attention[row, :end] = 1
        generated[row, len(prompt) : end] = True
    return tokens, attention, generated
