"""Faults of pruning and of the optimizers."""

from typing import Any

import torch

from gpt2.check.short_run import TRACED_PARAMETERS
from lib.optim.optimizers import Adam
from lib.optim.options import AdamFamilyOptions, AdamwspamOptions
from lib.optim.spam import Adamwspam
from lib.pruning import pruners
from lib.pruning.options import MagnitudeOptions, PruningOptions
from lib.pruning.pruners import MagnitudePruner, MaskPruner, MovementPruner, NonePruner, StatePruner
from tests.mutants.mutant import Mutant, after_init, nothing, replaced, same_as, then, together

_MATRIX = "test-matrix-optimizers"
_RELOAD = "resumed-weights"


def _forgetting(self: Adamwspam, state: dict[str, Any]) -> None:
    """Drop SPAM's state."""
    torch.optim.AdamW.load_state_dict(self, {k: v for k, v in state.items() if k != "spam"})


@torch.no_grad()
def _reviving(self: MaskPruner, step: int, progress: float, optimizer: Any) -> None:
    """Update masks without applying them."""
    if self._is_due(step, progress):
        self._reached = self._options.sparsity_at(progress)
        self._update_masks(optimizer)


def _grouped(**numbers: Any) -> Any:
    """Return a plant that overrides values of every parameter group."""
    return after_init(Adam, lambda self: [group.update(numbers) for group in self.param_groups])


def _turned(right: Any) -> Any:
    """Swap the betas during every update only."""

    def step(self: torch.optim.Adam, *given: Any, **named: Any) -> None:
        for group in self.param_groups:
            group["betas"] = group["betas"][::-1]
        right(self, *given, **named)
        for group in self.param_groups:
            group["betas"] = group["betas"][::-1]

    return step


def _by_chance(out: torch.Tensor, *given: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out.numel())
    return torch.rand(out.shape, generator=generator)


def _everything(right: Any) -> Any:
    return lambda model, include_embeddings: right(model, True)


MUTANTS = (
    Mutant(
        "pruning does not prune",
        "the pruner is never called",
        "pruned-50",
        {
            "pruned": ("target-sparsity", r"50%; 0\.0%"),
            "distinct": same_as("baseline"),
        },
        nothing(MaskPruner, "after_step"),
        quick=True,
    ),
    Mutant(
        "pruner is none",
        "the configured one is ignored",
        "pruned-50",
        {"pruned": ("target-sparsity", r"50%; 0\.0%")},
        replaced(MagnitudeOptions, "build", lambda _: lambda options, model: NonePruner()),
    ),
    Mutant(
        "pruned weights come back",
        "masks are not applied",
        "pruned-50",
        {"pruned": ("target-sparsity", "50%;")},
        replaced(MaskPruner, "after_step", lambda _: _reviving),
    ),
    Mutant(
        "pruning has no ramp",
        "the first event prunes everything",
        "pruned-50",
        {"pruned": "sparsity-ramp"},
        replaced(PruningOptions, "sparsity_at", lambda _: lambda self, progress: self.target),
    ),
    Mutant(
        "pruning stops half way",
        "half of the target is reached",
        "pruned-50",
        {"pruned": ("target-sparsity", r"50%; 2\d\.\d%")},
        then(PruningOptions, "sparsity_at", lambda out, *given: out / 2),
    ),
    Mutant(
        "embeddings are pruned unasked",
        "the token embedding is pruned too",
        "pruned-50",
        {"pruned": ("unpruned-parameter", r"wte\.weight; \d+")},
        replaced(pruners, "prunable_parameters", _everything),
    ),
    Mutant(
        "checkpoint loses the masks",
        "a resumed run prunes from scratch",
        "pruned-50",
        {"reload": _RELOAD},
        nothing(MaskPruner, "load_state_dict"),
        quick=True,
    ),
    Mutant(
        "checkpoint loses the scores of movement",
        "a resumed run forgets what moved",
        "adamw-movement",
        {"reload": _RELOAD},
        replaced(MovementPruner, "load_state_dict", lambda _: MaskPruner.load_state_dict),
        _MATRIX,
    ),
    Mutant(
        "checkpoint loses the state of SPAM",
        "the counters restart",
        "baseline",
        {"reload": _RELOAD},
        replaced(Adamwspam, "load_state_dict", lambda _: _forgetting),
    ),
    Mutant(
        "SPAM is AdamW",
        "no reset, no clipping, no damping, no warm-up",
        "baseline",
        {"pruned": ("distinct-optimizer", "adamwspam;")},
        together(
            nothing(Adamwspam, "_reset", "_clip", "_damp"),
            replaced(AdamwspamOptions, "warmup_factor", lambda _: lambda *given: 1.0),
        ),
    ),
    Mutant(
        "every optimizer is AdamW",
        "the configured one is ignored",
        "adamwspam-magnitude",
        {
            "pruned": ("distinct-optimizer", "adamwspam;"),
            "distinct": same_as("adamw-magnitude"),
        },
        replaced(AdamwspamOptions, "build", lambda _: AdamFamilyOptions.build),
        _MATRIX,
        beside=("adamw-magnitude",),
    ),
    Mutant(
        "betas are swapped",
        "the optimizer is built with them swapped",
        "baseline",
        {"pruned": ("optimizer-setting", r"betas \(0\.9, 0\.95\); \(0\.95, 0\.9\)")},
        _grouped(betas=(0.95, 0.9)),
    ),
    Mutant(
        "betas are swapped in the update",
        "the parameter groups show the configured order",
        "adamw-none",
        {"pruned": ("optimizer-update", f"adamw; .*({'|'.join(TRACED_PARAMETERS)})")},
        replaced(torch.optim.Adam, "step", _turned),
        _MATRIX,
    ),
    Mutant(
        "epsilon is wrong",
        "no gradient of the small form is small enough to reveal it",
        "baseline",
        {"pruned": ("optimizer-setting", "eps 1e-08; 1e-07")},
        _grouped(eps=1e-7),
    ),
    Mutant(
        "AMSGrad is off",
        "AdamWAdv is AdamW",
        "adamwadv-magnitude",
        {"pruned": ("distinct-optimizer", "adamwadv;")},
        _grouped(amsgrad=False),
        _MATRIX,
    ),
    Mutant(
        "weights are pruned by chance",
        "scores are random and constant",
        "pruned-50",
        {"pruned": ("pruning-order", "magnitude")},
        then(MagnitudePruner, "score", _by_chance),
    ),
    Mutant(
        "movement has the wrong sign",
        "weights that grow are pruned",
        "adamw-movement",
        {"pruned": ("pruning-order", "movement")},
        then(MovementPruner, "score", lambda out, *given: -out),
        _MATRIX,
    ),
    Mutant(
        "state pruning reads the weights alone",
        "the moments of AdamWPrune's base are ignored",
        "adamwprune-state",
        {"pruned": ("pruning-order", "of state")},
        then(StatePruner, "score", lambda out, self, name, *given: self._parameters[name].abs()),
        _MATRIX,
    ),
    Mutant(
        "optimizer never steps",
        "weights keep their initial values",
        "baseline",
        {
            "gradients": ("moving-parameter", r"wte\.weight;"),
            "steps": "falling-loss",
        },
        nothing(Adamwspam, "step"),
    ),
)
