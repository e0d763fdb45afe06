"""Checks of the final weights against the manifest and the summary."""

from collections.abc import Iterator, Mapping

import safetensors.torch
import torch
from torch import Tensor

from lib.runs.audit import AuditFinding, mismatch
from lib.runs.checkpoint import weights_digest
from lib.runs.record import FinalResults, RunRecord


def weight_findings(record: RunRecord) -> list[AuditFinding]:
    """Recompute digest, parameter count, finiteness and sparsity of the final weights."""
    path, recorded_digest = record.run.weights, record.manifest.value(str, "final_weights_digest")
    try:
        weights = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        return [AuditFinding(path.name, "weights", str(error))]
    final = record.final
    total = sum(weight.numel() for weight in weights.values())
    return [
        *mismatch(path.name, "final_weights_digest", recorded_digest, weights_digest(weights)),
        *mismatch(path.name, "parameters", final.parameters, total),
        *_finite(path.name, weights),
        *_sparsity(path.name, weights, final),
    ]


def _finite(file: str, weights: Mapping[str, Tensor]) -> Iterator[AuditFinding]:
    for name, weight in weights.items():
        if count := int((~torch.isfinite(weight)).sum()):
            yield AuditFinding(file, f"finite elements in {name}", f"{count} non-finite")


def _sparsity(
    file: str, weights: Mapping[str, Tensor], final: FinalResults
) -> Iterator[AuditFinding]:
    """Recompute the sparsity.

    The summary lists every prunable matrix, so no model has to be built.
    """
    layers = final.sparsity_by_layer
    if missing := layers.keys() - weights.keys():
        yield AuditFinding(file, "every prunable matrix", f"{min(missing)} is missing")
        return
    zeros = {name: int((weights[name] == 0).sum()) for name in layers}
    sizes = {name: weights[name].numel() for name in layers}
    for name, recorded in layers.items():
        yield from mismatch(file, f"sparsity of {name}", recorded, zeros[name] / sizes[name])
    total = sum(zeros.values()) / max(1, sum(sizes.values()))
    if total != final.sparsity:
        yield from mismatch(file, "sparsity", final.sparsity, total)
