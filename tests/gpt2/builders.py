"""Model configurations for tests, built directly without Kconfig; marks of tests."""

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import pytest

from gpt2.attention.config import (
    GATES,
    PATTERNS,
    POSITIONS,
    PROJECTIONS,
    SINKS,
    TERMS,
    TRANSFORMS,
    VALUE_MIXES,
    AttentionConfig,
)
from gpt2.mlp.options import ACTIVATIONS, MECHANISMS, ActivationOptions, MlpConfig
from gpt2.model_config import NORMS, ModelConfig
from gpt2.shape import ModelShape

needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason='needs: make setup EXTRAS="triton"'
)
needs_bitsandbytes = pytest.mark.skipif(
    not find_spec("bitsandbytes"), reason='needs: make setup EXTRAS="bitsandbytes"'
)


def _release(*names: str) -> tuple[int, ...]:
    """Return major and minor version of the first installed distribution; () without one."""
    for name in names:
        with suppress(PackageNotFoundError):
            return tuple(map(int, re.findall(r"\d+", version(name))[:2]))
    return ()


def _lacks_interpreter() -> bool:
    """Return whether triton is missing, or before 3.7: its interpreter fails with numpy 2.4."""
    # The last two are its names on ROCm.
    triton = _release("triton", "triton-rocm", "pytorch-triton-rocm")
    return not find_spec("triton") or (triton < (3, 7) and _release("numpy") >= (2, 4))


needs_interpreter = pytest.mark.skipif(
    _lacks_interpreter(),
    reason='needs: make setup EXTRAS="triton", and numpy<2.4 before triton 3.7',
)

SHAPE = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "block_size": 16,
    "vocab_multiple": 64,
    "dropout": 0.0,
    "bias": True,
    "vocab_size": 50,
}
# Default options of each component.
PARTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped": {"n_kv_head": 2},
    "latent": {"latent_dim": 0, "shared_expansion": False},
    "full": {},
    "qk_norm": {},
    "attention_sink": {},
    "value_residual": {"share": 0.3, "learnable": True},
    "sliding": {"window": 5},
    "learned": {},
    "rope": {"base": 100.0},
    "nsa": {
        "compress": 2,
        "stride": 1,
        "select": 2,
        "count": 4,
        "window": 5,
        "shared_kv": False,
        "phi": "mlp",
        "hidden": 8,
        "gate": "sigmoid",
        "select_by": "score",
        "branch_compressed": True,
        "branch_selected": True,
        "branch_window": True,
        "backend": "auto",
        "ranges": "lists",
        "ranges_min": 0,
    },
    "reciprocal": {"alpha": 0.3, "window": 64, "learnable": False},
    "ra_cross_token": {
        "mode": "topk",
        "apply": "output",
        "alpha": 0.2,
        "topk": 8,
        "scale": 1.0,
        "bias": 2.0,
        "head_average": False,
        "detach_stats": False,
    },
    "mlp_attn_gate": {"alpha": 0.1, "bias": 2.0, "dim": 8, "pooled": False},
    "mlp_cross_token": {
        "alpha": 0.3,
        "sparsity": "topk",
        "topk": 8,
        "tau": 0.5,
        "detach_weights": True,
        "dim": 8,
    },
    "mlp_latent": {"alpha": 0.2, "tying": "tied"},
}
MLP: dict[str, Any] = {
    "activation": "gelu_tanh",
    "sizing": "hidden",
    "hidden": 0,
    "ratio": 2.5,
    "share": 0.15,
    "model_params": 0,
}
# All mechanisms that one model can combine.
EVERYTHING: dict[str, Any] = {
    "projection": "latent",
    "terms": ("reciprocal",),
    "gates": ("ra_cross_token",),
    "mechanisms": ("mlp_cross_token", "mlp_latent", "mlp_attn_gate"),
}


def make_activation(name: str) -> ActivationOptions:
    """Return the options of an activation; they have no fields."""
    return ACTIVATIONS.options(name)()


def make_model_config(
    projection: str = "dense",
    pattern: str = "full",
    terms: tuple[str, ...] = (),
    gates: tuple[str, ...] = (),
    mechanisms: tuple[str, ...] = (),
    parts: dict[str, dict[str, Any]] | None = None,
    attention_backend: str = "auto",
    positions: str = "learned",
    grad_checkpointing: bool = False,
    transforms: tuple[str, ...] = (),
    norm: str = "layernorm",
    sinks: tuple[str, ...] = (),
    untied_head: bool = False,
    z_loss: float = 0.0,
    value_mixes: tuple[str, ...] = (),
    **overrides: Any,
) -> ModelConfig:
    """Build the configuration of a small GPT-2; ``overrides`` are fields of Shape and MlpConfig.

    ``parts`` changes the options of a component: ``parts={"mlp_latent": {"tying": "scalar"}}``.
    """
    unknown = overrides.keys() - SHAPE.keys() - MLP.keys()
    assert not unknown, f"not a field of Shape or MlpConfig: {unknown}"

    def options(registry: Any, name: str) -> Any:
        return registry.options(name)(**(PARTS[name] | (parts or {}).get(name, {})))

    attention = AttentionConfig(
        options(PROJECTIONS, projection),
        options(PATTERNS, pattern),
        options(POSITIONS, positions),
        tuple(options(TERMS, name) for name in terms),
        tuple(options(GATES, name) for name in gates),
        backend=attention_backend,
        transforms=tuple(options(TRANSFORMS, name) for name in transforms),
        sinks=tuple(options(SINKS, name) for name in sinks),
        value_mixes=tuple(options(VALUE_MIXES, name) for name in value_mixes),
    )
    mlp = {name: overrides.get(name, value) for name, value in MLP.items()}
    mlp["activation"] = make_activation(mlp["activation"])
    shape = {name: overrides.get(name, value) for name, value in SHAPE.items()}
    built = tuple(options(MECHANISMS, name) for name in MECHANISMS if name in mechanisms)
    return ModelConfig(
        ModelShape(**shape),
        attention,
        MlpConfig(built, **mlp),
        grad_checkpointing,
        loss_backend="auto",
        z_loss=z_loss,
        untied_head=untied_head,
        norm=NORMS.options(norm)(),
    )
