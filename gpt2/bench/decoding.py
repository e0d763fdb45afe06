"""Cached decoding against the full forward pass, for every mechanism with every attention.

    python -m gpt2.bench.decoding

Prints a Markdown table with the largest deviation of a logit in float64, for small models with
large random weights, and the KV cache size of GPT-2 124M with the same mechanisms in bf16: bytes
per additional token and, after the +, the constant bytes per sequence.

B batch, T tokens.
"""

import sys
from collections.abc import Sequence

import torch

from gpt2.ablation import RATIO
from gpt2.ablation.resolve import resolve_config, resolve_study
from gpt2.model import GPT
from gpt2.model_config import ModelConfig
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.report.render import markdown_table

# Longer than each window, so that tokens are evicted from every sliding cache.
_TOKENS = 72
# Tokens of each call: a short prompt, long steps, single tokens.
CALLS = (3, 38, 1, 1, 24, 1, 1, 2, 1)
SMALL: dict[str, SymbolValue] = {
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 3,
    "N_HEAD": 4,
    "N_EMBD": 96,
    "BLOCK_SIZE": _TOKENS,
    "DROPOUT": "0.0",
    "TOKENIZER_BYTE": True,
}
SMALL_WINDOW = 20
_GPT2: dict[str, SymbolValue] = {"MODEL_SIZE_GPT2": True}
_BYTES_PER_ELEMENT = 2
_PROJECTIONS: dict[str, dict[str, SymbolValue]] = {
    "dense": {},
    "grouped": {"ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 2},
    "latent": {"ATTENTION_PROJECTION_LATENT": True},
}
_RACT: dict[str, dict[str, SymbolValue]] = {
    f"RA-CT {mode}, {apply}": {
        "RA_CROSS_TOKEN": True,
        f"RA_CROSS_TOKEN_MODE_{mode.upper()}": True,
        f"RA_CROSS_TOKEN_APPLY_{apply.upper()}": True,
    }
    for mode in ("topk", "max", "entropy", "rms")
    for apply in ("output", "weights")
}
_ALL: dict[str, SymbolValue] = dict.fromkeys(
    ("RECIPROCAL", "RA_CROSS_TOKEN", "MLP_ATTN_GATE", "MLP_CROSS_TOKEN"), True
)
_MECHANISMS: dict[str, dict[str, SymbolValue]] = {
    "none": {},
    "RA": {"RECIPROCAL": True},
    "RA learnable": {"RECIPROCAL": True, "RECIPROCAL_LEARNABLE": True},
    **_RACT,
    "MLP gate": {"MLP_ATTN_GATE": True},
    "MLP gate, pooled": {"MLP_ATTN_GATE": True, "MLP_ATTN_GATE_POOLED": True},
    "cross-token MLP, topk": {"MLP_CROSS_TOKEN": True},
    "cross-token MLP, rms": {"MLP_CROSS_TOKEN": True, "MLP_CROSS_TOKEN_SPARSITY_RMS": True},
    "cross-token MLP, none": {"MLP_CROSS_TOKEN": True, "MLP_CROSS_TOKEN_SPARSITY_NONE": True},
    "latent coupling, tied": {"MLP_LATENT": True},
    "latent coupling, untied": {"MLP_LATENT": True, "MLP_LATENT_TYING_UNTIED": True},
    "latent coupling, scalar": {"MLP_LATENT": True, "MLP_LATENT_TYING_SCALAR": True},
    "RA, RA-CT, gate, cross-token": _ALL,
    "and latent coupling": {**_ALL, "MLP_LATENT": True},
}


def mechanism_models(
    size: dict[str, SymbolValue], window: int
) -> dict[str, dict[str, ModelConfig]]:
    """Return mechanism → attention → model, for every combination that Kconfig allows."""
    models: dict[str, dict[str, ModelConfig]] = {}
    tree = KconfigTree()
    patterns: dict[str, dict[str, SymbolValue]] = {
        "full": {},
        "sliding": {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": window},
    }
    for mechanism, changes in _MECHANISMS.items():
        row = models.setdefault(mechanism, {})
        for projection, projection_symbols in _PROJECTIONS.items():
            # Latent coupling requires latent attention.
            if "MLP_LATENT" in changes and projection != "latent":
                continue
            for pattern, pattern_symbols in patterns.items():
                layers = _layers(size | projection_symbols | pattern_symbols | changes)
                row[f"{projection}, {pattern}"] = resolve_config(tree, layers).model
    return models


def steps(size: dict[str, SymbolValue] = SMALL) -> dict[str, ModelConfig]:
    """Return the model of every step of the RATIO study, by slug."""
    base = _layers(size | {"RA_MLA_ABLATION_MODE": True})
    return {s.step.slug: s.config.model for s in resolve_study(KconfigTree(), base, RATIO)}


def max_deviation(config: ModelConfig, calls: Sequence[int] = CALLS) -> float:
    """Return the largest logit difference between cached decoding and the full forward pass.

    ``calls`` are the tokens of each decoding call. Computed in float64 on two sequences, with
    weights large enough for every mechanism to matter. The cache size is checked against the size
    that the configuration declares.
    """
    torch.manual_seed(0)
    model = GPT(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    idx_BT = torch.randint(0, config.shape.vocab_size, (2, sum(calls)))
    cache = model.new_cache()
    decoded_BTV = torch.cat([model.decode(part, cache) for part in idx_BT.split(list(calls), 1)], 1)
    elements = len(idx_BT) * config.cached_numbers(sum(calls))
    assert cache.num_bytes() == elements * torch.float64.itemsize, "cache size differs from config"
    with torch.no_grad():
        return float((decoded_BTV - model(idx_BT)).abs().max())


def cache_bytes(config: ModelConfig) -> tuple[int, int]:
    """Return the bf16 cache bytes per additional token at full context, and the constant rest."""
    length = config.shape.block_size
    total = config.cached_numbers(length) * _BYTES_PER_ELEMENT
    token = total - config.cached_numbers(length - 1) * _BYTES_PER_ELEMENT
    return token, total - length * token


def to_markdown() -> str:
    """Return the Markdown tables of all combinations and of the study's steps."""
    small, large = mechanism_models(SMALL, SMALL_WINDOW), mechanism_models(_GPT2, 256)
    columns = list(small["none"])
    rows = []
    for mechanism, models in small.items():
        cells = [
            _cell(models[c], large[mechanism][c]) if c in models else "not allowed" for c in columns
        ]
        rows.append((mechanism, *cells))
    declared = steps(_GPT2)
    step_rows = [(slug, _cell(config, declared[slug])) for slug, config in steps().items()]
    combinations = markdown_table(("mechanisms", *columns), rows)
    return f"{combinations}\n{markdown_table(('step', 'deviation, bytes'), step_rows)}"


def _cell(small: ModelConfig, large: ModelConfig) -> str:
    token, sequence = cache_bytes(large)
    return f"{max_deviation(small):.0e}, {token:,}" + (f" + {sequence:,}" if sequence else "")


def _layers(changes: dict[str, SymbolValue]) -> list[ConfigLayer]:
    symbols = {"DEVICE_CPU": True, "SINGLE_TRAINING": True, **changes}
    if "RA_MLA_ABLATION_MODE" in changes:
        del symbols["SINGLE_TRAINING"]
    return [ConfigLayer.of("command line", "decoding", symbols)]


def main() -> None:
    """Print the tables, computed with one thread."""
    torch.set_num_threads(1)
    sys.stdout.write(to_markdown())


if __name__ == "__main__":
    main()
