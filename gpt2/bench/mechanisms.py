"""Forward and backward time of every step of the RATIO study, relative to the baseline.

    python -m gpt2.bench.mechanisms THREADS ROUNDS

Times two blocks of GPT-2's width on byte tokens, so that the blocks dominate and not the output
head. B micro-batch, T tokens.
"""

import json
import sys
import time

import torch

from gpt2.ablation.ratio import RATIO
from gpt2.ablation.resolve import resolve_study
from gpt2.config import Config
from gpt2.model import GPT
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.project import ROOT

# Tokens per sequence → number of sequences: about a thousand tokens in total.
SHAPES = {256: 4, 1024: 1}
_BLOCKS = 2


def distinct_configs(tokens: int) -> dict[str, Config]:
    """Return the steps with distinct models, by slug, at ``tokens`` context."""
    changes: dict[str, SymbolValue] = {
        "DEVICE_CPU": True,
        "TOKENIZER_BYTE": True,
        "MODEL_SIZE_CUSTOM": True,
        "N_LAYER": _BLOCKS,
        "N_HEAD": 12,
        "N_EMBD": 768,
        "BLOCK_SIZE": tokens,
        "DROPOUT": "0.0",
    }
    base = [
        *defconfig_layers(ROOT, "gpt2-quickstart"),
        ConfigLayer.of("command line", "bench", changes),
    ]
    configs = {s.step.slug: s.config for s in resolve_study(KconfigTree(), base, RATIO)}
    unique: dict[object, str] = {}
    for slug, config in configs.items():
        unique.setdefault(config.model, slug)
    return {slug: configs[slug] for slug in unique.values()}


def seconds(model: GPT, tokens_BT: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of one forward and one backward pass of the mean loss."""
    start = time.perf_counter()
    loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
    forward = time.perf_counter()
    loss.backward()
    return forward - start, time.perf_counter() - forward


def measure(tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return each step's time relative to the baseline of the same round, for all rounds."""
    models = {}
    for slug, config in distinct_configs(tokens).items():
        models[slug] = GPT(config.model)
        models[slug].init_weights(config.seed)
    tokens_BT = torch.randint(0, 256, (SHAPES[tokens], tokens + 1))
    ratios: dict[str, list[tuple[float, float]]] = {slug: [] for slug in models}
    # The first round warms up caches and allocator.
    for count in range(1 + rounds):
        times = {slug: seconds(model, tokens_BT) for slug, model in models.items()}
        if count:
            forward, backward = times["baseline"]
            for slug, (f, b) in times.items():
                ratios[slug].append((f / forward, b / backward))
    return {
        slug: {
            "forward": [forward for forward, _ in pairs],
            "backward": [backward for _, backward in pairs],
        }
        for slug, pairs in ratios.items()
    }


def main() -> None:
    """Measure all context lengths and print the ratios as JSON."""
    threads, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    ratios = {str(tokens): measure(tokens, rounds) for tokens in SHAPES}
    sys.stdout.write(json.dumps(ratios) + "\n")


if __name__ == "__main__":
    main()
