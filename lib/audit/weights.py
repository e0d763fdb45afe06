"""The final weights against what manifest and summary say of them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lib.audit.finding import Finding, differing
from lib.repro.weights import weights_digest


def weight_findings(
    path: Path, manifest: Mapping[str, Any], summary: Mapping[str, Any]
) -> list[Finding]:
    """Digest, number, finiteness and zeros of the weights in ``path``, computed again."""
    try:
        weights = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        return [Finding(path.name, "weights", str(error))]
    final = summary["final"]
    total = sum(weight.numel() for weight in weights.values())
    return [
        *differing(
            path.name,
            "final_weights_digest",
            manifest["final_weights_digest"],
            weights_digest(weights),
        ),
        *differing(path.name, "parameters", final["parameters"], total),
        *_finite(path.name, weights),
        *_sparsity(path.name, weights, final),
    ]


def _finite(file: str, weights: Mapping[str, Tensor]) -> Iterator[Finding]:
    for name, weight in weights.items():
        if count := int((~torch.isfinite(weight)).sum()):
            yield Finding(file, f"finite numbers in {name}", f"{count} others")


def _sparsity(
    file: str, weights: Mapping[str, Tensor], final: Mapping[str, Any]
) -> Iterator[Finding]:
    """The summary names every prunable matrix, so no model has to be built."""
    layers = final["sparsity_by_layer"]
    if unknown := layers.keys() - weights.keys():
        yield Finding(file, "every prunable matrix", f"none called {min(unknown)}")
        return
    zeros = {name: int((weights[name] == 0).sum()) for name in layers}
    sizes = {name: weights[name].numel() for name in layers}
    for name, recorded in layers.items():
        yield from differing(file, f"sparsity of {name}", recorded, zeros[name] / sizes[name])
    whole = sum(zeros.values()) / max(1, sum(sizes.values()))
    if whole != final["sparsity"]:
        yield from differing(file, "sparsity", final["sparsity"], whole)
