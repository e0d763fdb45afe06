"""Faults of pruning and of the optimizers."""

from typing import Any

import torch

from gpt2.check.trial import FOLLOWED
from gpt2.training import start
from lib.optim import OPTIMIZERS
from lib.optim.adam.module import Adam
from lib.optim.adamwspam.module import Adamwspam
from lib.optim.adamwspam.options import AdamwspamOptions
from lib.pruning import PRUNERS, mask
from lib.pruning.magnitude.module import MagnitudePruner
from lib.pruning.mask import MaskPruner
from lib.pruning.movement.module import MovementPruner
from lib.pruning.none.module import NonePruner
from lib.pruning.options import PruningOptions
from lib.pruning.state.module import StatePruner
from tests.mutants.mutant import Mutant, after_init, nothing, replaced, then, together

_MATRIX = "test-matrix-optimizers"
_RELOAD = "the same (loss at step|weights in the end)"
_ACTS = "acts; found: the same weights as adamw from the same gradients"


def _forgetting(self: Adamwspam, state: dict[str, Any]) -> None:
    """SPAM's own state is dropped."""
    torch.optim.AdamW.load_state_dict(self, {k: v for k, v in state.items() if k != "spam"})


@torch.no_grad()
def _reviving(self: MaskPruner, step: int, progress: float, optimizer: Any) -> None:
    """Masks are made, and no weight is zeroed by them."""
    if self._is_due(step, progress):
        self._reached = self._options.sparsity_at(progress)
        self._update_masks(optimizer)


def _grouped(**numbers: Any) -> Any:
    """Every group of the optimizer gets other numbers than the options say."""
    return after_init(Adam, lambda self: [group.update(numbers) for group in self.param_groups])


def _turned(right: Any) -> Any:
    """Groups say what is configured, and every update swaps the betas."""

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
        "the pruner is never asked",
        "pruned-50",
        {
            "pruned": "a sparsity of 50%; found: 0.0% of the weights are zero",
            "distinct": "another function or another training than baseline",
        },
        nothing(MaskPruner, "after_step"),
        quick=True,
    ),
    Mutant(
        "pruner is none",
        "the configured one is not built",
        "pruned-50",
        {"pruned": "a sparsity of 50%; found: 0.0% of the weights are zero"},
        lambda patch: patch.setattr(
            PRUNERS, "module", lambda name: lambda model, options: NonePruner(model, options)
        ),
    ),
    Mutant(
        "pruned weights come back",
        "masks are made and not applied",
        "pruned-50",
        {"pruned": "a sparsity of 50%"},
        replaced(MaskPruner, "after_step", lambda _: _reviving),
    ),
    Mutant(
        "pruning has no ramp",
        "everything at the first event",
        "pruned-50",
        {"pruned": "a sparsity that grows along the ramp"},
        replaced(PruningOptions, "sparsity_at", lambda _: lambda self, progress: self.target),
    ),
    Mutant(
        "pruning stops half way",
        "half of the target is reached",
        "pruned-50",
        {"pruned": r"a sparsity of 50%; found: 2\d\.\d% of the weights"},
        then(PruningOptions, "sparsity_at", lambda out, *given: out / 2),
    ),
    Mutant(
        "embeddings are pruned unasked",
        "the target is shared with the tokens' table",
        "pruned-50",
        {"pruned": r"wte\.weight is not pruned; found: \d+ of its weights became zero"},
        replaced(mask, "prunable_parameters", _everything),
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
        "its counters start anew",
        "baseline",
        {"reload": _RELOAD},
        replaced(Adamwspam, "load_state_dict", lambda _: _forgetting),
    ),
    Mutant(
        "SPAM is AdamW",
        "no reset, no clipping, no damping, no warm-up",
        "baseline",
        {"pruned": f"adamwspam {_ACTS}"},
        together(
            nothing(Adamwspam, "_reset", "_clip", "_damp"),
            replaced(AdamwspamOptions, "warmup_factor", lambda _: lambda *given: 1.0),
        ),
    ),
    Mutant(
        "every optimizer is AdamW",
        "the configured one is not built",
        "adamwspam-magnitude",
        {
            "pruned": f"adamwspam {_ACTS}",
            "distinct": "another function or another training than adamw-magnitude",
        },
        lambda patch: patch.setattr(
            OPTIMIZERS,
            "module",
            lambda name, right=OPTIMIZERS.module: right("adamw"),
        ),
        _MATRIX,
        beside=("adamw-magnitude",),
    ),
    Mutant(
        "betas change places",
        "the optimizer is built with them swapped",
        "baseline",
        {"pruned": r"an optimizer with betas \(0\.9, 0\.95\); found: \(0\.95, 0\.9\)"},
        _grouped(betas=(0.95, 0.9)),
    ),
    Mutant(
        "betas change places in the update",
        "the optimizer says that they do not",
        "adamw-none",
        {"pruned": rf"the trainer updates by adamw; found: ({'|'.join(FOLLOWED)}) is not what"},
        replaced(torch.optim.Adam, "step", _turned),
        _MATRIX,
    ),
    Mutant(
        "epsilon is another",
        "no gradient of the small form is small enough to show it",
        "baseline",
        {"pruned": r"an optimizer with eps 1e-08; found: 1e-07"},
        _grouped(eps=1e-7),
    ),
    Mutant(
        "AMSGrad is off",
        "AdamWAdv is AdamW",
        "adamwadv-magnitude",
        {"pruned": f"adamwadv {_ACTS}"},
        _grouped(amsgrad=False),
        _MATRIX,
    ),
    Mutant(
        "weights are pruned by chance",
        "the scores are drawn, the same ones each time",
        "pruned-50",
        {"pruned": "the lowest scores of magnitude are pruned; found: one of .* goes at step"},
        then(MagnitudePruner, "score", _by_chance),
    ),
    Mutant(
        "movement is turned round",
        "weights that grow are pruned",
        "adamw-movement",
        {"pruned": "the lowest scores of movement are pruned; found: one of .* goes at step"},
        then(MovementPruner, "score", lambda out, *given: -out),
        _MATRIX,
    ),
    Mutant(
        "state pruning reads the weights alone",
        "the moments of AdamWPrune's base are left out",
        "adamwprune-state",
        {"pruned": "the lowest scores of state are pruned; found: one of .* goes at step"},
        then(StatePruner, "score", lambda out, self, name, *given: self._parameters[name].abs()),
        _MATRIX,
    ),
    Mutant(
        "optimizer never steps",
        "weights stay where they started",
        "baseline",
        {
            "gradients": "the optimizer moves wte.weight; found: equal after 3 optimizer steps",
            "steps": "a loss that falls on a repeated batch",
        },
        nothing(Adamwspam, "step"),
    ),
)
