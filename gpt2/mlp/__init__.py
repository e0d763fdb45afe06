"""MLP: GPT-2's dense core and mechanisms that read or modify its hidden layer."""

from lib.registry import Registry

MECHANISMS = Registry(
    "MLP mechanism",
    parts={
        "mlp_cross_token": "gpt2.mlp.mlp_cross_token",
        "mlp_latent": "gpt2.mlp.mlp_latent",
        "mlp_attn_gate": "gpt2.mlp.mlp_attn_gate",
    },
)
