"""MLP: GPT-2's dense core and mechanisms that read or modify its hidden layer."""

from lib.config.registry import Registry

MECHANISMS = Registry(
    "MLP mechanism",
    parts={
        "mlp_cross_token": (
            "gpt2.mlp.mlp_cross_token.options",
            "gpt2.mlp.mlp_cross_token.module",
            "gpt2.mlp.mlp_cross_token.reference",
        ),
        "mlp_latent": (
            "gpt2.mlp.mlp_latent.options",
            "gpt2.mlp.mlp_latent.module",
            "gpt2.mlp.mlp_latent.reference",
        ),
        "mlp_attn_gate": (
            "gpt2.mlp.mlp_attn_gate.options",
            "gpt2.mlp.mlp_attn_gate.module",
            "gpt2.mlp.mlp_attn_gate.reference",
        ),
    },
)
