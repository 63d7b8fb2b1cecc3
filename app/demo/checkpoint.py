"""The policy as a Hugging Face checkpoint directory, which an engine of another process starts from.

Invariant: the weights in it are the trainer's FP32 masters as `.bfloat16()` casts them, each tied tensor once, and the
configuration says so.
"""

from __future__ import annotations

import json
from pathlib import Path

from app.demo.model import Policy

WEIGHTS = "model.safetensors"


def write_checkpoint(policy: Policy, directory: Path) -> None:
    """Make `directory`, which must not exist, with safetensors, config and tokenizer files."""
    from safetensors.torch import save_file

    directory.mkdir()
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in policy.model.named_parameters()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = json.loads(policy.config_json)
    # Whatever the config was made from: what is written here is a Llama in BF16. Older readers know the second name.
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    config |= {"torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    policy.tokenizer.save_pretrained(str(directory))
