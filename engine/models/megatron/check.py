"""Settings of Megatron-Core that change what stored weights mean without changing names or sizes.

One invariant: what a table could not notice is refused here, from the trainer's own configuration.
"""

from __future__ import annotations

from engine.errors import InvalidInput

_NEEDED: tuple[tuple[str, object, str], ...] = (
    ("gated_linear_unit", True, "an MLP without a gate is not one of these models'"),
    ("normalization", "RMSNorm", "another norm is not one of these models'"),
    ("layernorm_zero_centered_gamma", False, "norms are stored minus one"),
    ("attention_output_gate", False, "queries and gates share rows"),
    ("moe_mlp_glu_interleave_size", None, "gate and up rows of an expert alternate"),
    ("moe_shared_expert_glu_interleave_size", None, "gate and up rows of the shared experts alternate"),
    ("moe_single_grouped_weight", False, "the experts of a rank are one tensor"),
    ("moe_latent_size", None, "experts work in a space of their own"),
    ("heterogeneous_block_specs", False, "layers differ in shape"),
    ("mtp_num_layers", None, "layers of multi-token prediction have no table"),
)


def check_transformer_config(config: object) -> None:
    """InvalidInput if a `TransformerConfig` (any object with its attributes) has a setting that no table expresses.

    Settings that this version of Megatron-Core does not have yet, or has no longer, count as off.
    """
    for name, needed, because in _NEEDED:
        found = getattr(config, name, needed)
        if found != needed and (found or needed):
            raise InvalidInput(
                f"{name}={found!r} is not supported: {because}.", remedy=f"Train with {name}={needed!r}."
            )
