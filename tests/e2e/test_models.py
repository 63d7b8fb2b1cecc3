"""Real architectures and every way to keep weights beside an optimizer, from the optimizer step to the receiver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from clients.protocol import JobState
from engine.errors import UnsupportedOptimizer
from tests.e2e.line import Line

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def _llama(t: Any) -> Any:
    return t.LlamaForCausalLM(t.LlamaConfig(**SMALL, tie_word_embeddings=True))


def _qwen3(t: Any) -> Any:
    return t.Qwen3ForCausalLM(t.Qwen3Config(**SMALL, head_dim=8))


def _gpt2(t: Any) -> Any:
    return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=4))


def _moe(t: Any) -> Any:
    return t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(**SMALL, head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
    )


@pytest.mark.parametrize("build", [_llama, _qwen3, _gpt2, _moe])
def test_transformers(url: str, build: Callable[[Any], Any]) -> None:
    model = build(pytest.importorskip("transformers"))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Line(url, model, optimizer) as line:
        for _ in range(3):
            ids = torch.randint(0, 100, (2, 8))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert line.ship().detail["failed_tiles"] == 0


def random_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def test_masters_beside_bf16_weights(url: str) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100)).bfloat16()
    masters = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-4)
    with Line(url, model, optimizer, masters=masters) as line:
        for _ in range(3):
            for master in masters.values():
                master.grad = torch.randn_like(master)
            optimizer.step()
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.copy_(masters[n])
            assert line.ship().detail["failed_tiles"] == 0


def test_weights_that_no_formula_covers_are_compared(url: str) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.LayerNorm(50), nn.BatchNorm1d(50))
    model.register_parameter("low", nn.Parameter(torch.randn(300).bfloat16()))
    stored = {"0.weight": torch.float16, "1.weight": torch.float32, "2.running_mean": torch.bfloat16}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in stored.items()}
    with Line(url, model, optimizer, dtypes=dtypes, cast=stored) as line:
        for step in range(1, 4):
            model(torch.randn(4, 50))
            random_gradients(model)
            optimizer.step()
            job = line.ship()
            if step > 1:
                assert job.detail["dense_tiles"] == 0


def test_several_optimizers_and_those_that_cannot_be_undone(url: str) -> None:
    model = nn.Sequential(nn.Linear(60, 60), nn.LayerNorm(60))
    optimizers = [
        torch.optim.Muon([model[0].weight], lr=1e-3),
        torch.optim.SGD([model[0].bias], lr=1e-3, momentum=0.9),
        torch.optim.AdamW(model[1].parameters(), lr=1e-4),
    ]
    with pytest.raises(UnsupportedOptimizer, match="Muon"):
        Line(url, model, optimizers)
    with Line(url, model, optimizers, detector={"0.weight": "snapshot", "0.bias": "dense"}) as line:
        for _ in range(3):
            random_gradients(model)
            for optimizer in optimizers:
                optimizer.step()
            assert line.ship().detail["failed_tiles"] == 0


def test_a_new_launch_goes_on_where_the_last_one_stopped(url: str) -> None:
    model = nn.Linear(60, 60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        random_gradients(model)
        optimizer.step()

    with Line(url, model, optimizer) as line:
        step()
        assert line.ship().version == 1
        step()  # never published
        again = line.relaunched(optimizer)
        again.register(step=2)
        line.number = 2
        while line.ship().state is JobState.ACCUMULATED:  # the launch's own first version is on its way
            step()
        step()
        assert line.ship().state is JobState.COMMITTED
        rewound = [v for v in line.control.versions().versions if v.rewound]
        assert [v.epoch for v in rewound] == [2]


def test_a_model_published_twice_arrives_twice(url: str) -> None:
    model = nn.Linear(60, 60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Line(url, model, optimizer) as one, Line(url, model, optimizer) as other:
        for _ in range(2):
            random_gradients(model)
            optimizer.step()
            one.ship()
            other.ship()
