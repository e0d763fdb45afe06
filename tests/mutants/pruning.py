"""Faults of pruning."""

from typing import Any

import torch

from gpt2.training import loop
from lib.optim.spam import Adamwspam
from lib.pruning import pruners
from lib.pruning.options import PruningOptions
from lib.pruning.pruners import MaskPruner, MovementPruner
from tests.mutants.mutant import Mutant, edited, nothing, replaced, same_as, then

_MATRIX = "test-matrix-optimizers"
_SINGLE = "gpt2-124m"


def _everything(right: Any) -> Any:
    return lambda model, include_embeddings: right(model, True)


MUTANTS = (
    Mutant(
        "pruning does not prune",
        "pruned-50",
        {"pruned": ("target-sparsity", r"50%; 0\.0%"), "distinct": same_as("baseline")},
        nothing(MaskPruner, "after_step"),
        quick=True,
    ),
    Mutant(
        "embeddings are pruned unasked",
        "pruned-50",
        {"pruned": "unpruned-parameter"},
        replaced(pruners, "prunable_parameters", _everything),
    ),
    Mutant(
        "movement has the wrong sign",
        "adamw-movement",
        {"pruned": ("pruning-order", "movement")},
        then(MovementPruner, "score", lambda out, *given: -out),
        _MATRIX,
    ),
    Mutant(
        "layer pruning is global",
        "run",
        {"pruned": "sparsity-ramp"},
        edited(MaskPruner, "_scopes", '== "global"', '!= "global"'),
        defconfig=_SINGLE,
        settings={"PRUNING_MAGNITUDE": True, "PRUNING_SCOPE_LAYER": True},
    ),
    Mutant(
        "cubic ramp is linear",
        "pruned-50",
        {"pruned": "sparsity-ramp"},
        edited(PruningOptions, "sparsity_at", "(1.0 - (1.0 - x) ** 3)", "x"),
    ),
    Mutant(
        "the first chunk of a matrix is ranked",
        "pruned-50",
        {"pruned": "check.exception"},
        edited(pruners, "bottom_k", "chain(*chunks.values())", "c[0] for c in chunks.values()"),
    ),
    Mutant(
        "gates are pruned",
        "golden-gate",
        {"pruned": ("unpruned-parameter", r"no pruning of h\.\d.*gate")},
        lambda patch: patch.setattr(pruners, "NeverPruned", torch.nn.Bilinear),
        settings={"PRUNING_MAGNITUDE": True},
    ),
    Mutant(
        "gradients of pruned weights remain",
        "pruned-50",
        {"pruned": ("step-record", "norm of step")},
        nothing(MaskPruner, "mask_gradients"),
    ),
    Mutant(
        "moments of pruned weights remain",
        "pruned-50",
        {"pruned": ("pruned-weight", "optimizer state 0 of")},
        nothing(MaskPruner, "_mask_state"),
    ),
    Mutant(
        "gradients are masked after the norm",
        "pruned-50",
        {"pruned": "driven-update"},
        edited(
            loop,
            "optimizer_step",
            "    state.pruner.mask_gradients()\n    norms = _gradient_norms(parameters)",
            "    norms = _gradient_norms(parameters)\n    state.pruner.mask_gradients()",
        ),
    ),
    Mutant(
        "pruned weights are ranked again",
        "adamw-movement",
        {"pruned": "revived-weight"},
        edited(MaskPruner, "_alive_score", ".masked_fill_(~self.masks[name], -torch.inf)", ""),
        _MATRIX,
    ),
    Mutant(
        "state score has no bias correction",
        "run",
        {"pruned": ("pruning-score", "bitter8")},
        replaced(pruners, "_beta1", lambda _: lambda *given: 0.0),
        _SINGLE,
        settings={"OPTIMIZER_ADAMWPRUNE": True, "ADAMWPRUNE_VARIANT_BITTER8": True},
    ),
    Mutant(
        "optimizer never steps",
        "baseline",
        {"gradients": ("moving-parameter", r"wte\.weight;")},
        nothing(Adamwspam, "step"),
    ),
    Mutant(
        "the recorded sparsity is half of that of the weights",
        "pruned-50",
        {"pruned": "recorded-sparsity"},
        then(MaskPruner, "sparsity", lambda share, *given: share / 2),
    ),
)
