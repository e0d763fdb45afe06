"""Faults of pruning."""

import dataclasses
from typing import Any

import torch

from gpt2 import train
from lib.optim.spam import Adamwspam
from lib.pruning import options, pruners
from lib.pruning.options import MagnitudeOptions, PruningOptions, StateOptions
from lib.pruning.pruners import MagnitudePruner, MaskPruner, MovementPruner, NonePruner, StatePruner
from tests.mutants.mutant import Mutant, edited, entry, nothing, replaced, same_as, then

_MATRIX = "test-matrix-optimizers"
_SINGLE = "gpt2-124m"
_RELOAD = "resumed-weights"


@torch.no_grad()
def _reviving(self: MaskPruner, step: int, progress: float, optimizer: Any) -> None:
    """Update masks without applying them."""
    if self._is_due(step, progress):
        self._reached = self._options.sparsity_at(progress)
        self._update_masks(optimizer)


def _by_chance(out: torch.Tensor, *given: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out.numel())
    return torch.rand(out.shape, generator=generator)


def _everything(right: Any) -> Any:
    return lambda model, include_embeddings: right(model, True)


def _variant(name: str, **changes: str) -> Any:
    """Return a plant that changes the ramp or scope of a variant."""
    changed = dataclasses.replace(options.PRUNING_VARIANTS[name], **changes)
    return lambda patch: patch.setitem(options.PRUNING_VARIANTS, name, changed)


MUTANTS = (
    Mutant(
        "pruning does not prune",
        "pruned-50",
        {"pruned": ("target-sparsity", r"50%; 0\.0%"), "distinct": same_as("baseline")},
        nothing(MaskPruner, "after_step"),
        quick=True,
    ),
    Mutant(
        "pruner is none",
        "pruned-50",
        {"pruned": ("target-sparsity", r"50%; 0\.0%")},
        entry(pruners.MODULES, MagnitudeOptions, lambda model, options: NonePruner()),
    ),
    Mutant(
        "pruned weights come back",
        "pruned-50",
        {"pruned": ("target-sparsity", "50%;")},
        replaced(MaskPruner, "after_step", lambda _: _reviving),
    ),
    Mutant(
        "pruning has no ramp",
        "pruned-50",
        {"pruned": "sparsity-ramp"},
        replaced(PruningOptions, "sparsity_at", lambda _: lambda self, progress: self.target),
    ),
    Mutant(
        "pruning stops half way",
        "pruned-50",
        {"pruned": ("target-sparsity", r"50%; 2\d\.\d%")},
        then(PruningOptions, "sparsity_at", lambda out, *given: out / 2),
    ),
    Mutant(
        "embeddings are pruned unasked",
        "pruned-50",
        {"pruned": "unpruned-parameter"},
        replaced(pruners, "prunable_parameters", _everything),
    ),
    Mutant(
        "checkpoint loses the masks",
        "pruned-50",
        {"reload": _RELOAD},
        nothing(MaskPruner, "load_state_dict"),
        quick=True,
    ),
    Mutant(
        "checkpoint loses the scores of movement",
        "adamw-movement",
        {"reload": _RELOAD},
        replaced(MovementPruner, "load_state_dict", lambda _: MaskPruner.load_state_dict),
        _MATRIX,
    ),
    Mutant(
        "weights are pruned by chance",
        "pruned-50",
        {"pruned": ("pruning-order", "magnitude")},
        then(MagnitudePruner, "score", _by_chance),
    ),
    Mutant(
        "movement has the wrong sign",
        "adamw-movement",
        {"pruned": ("pruning-order", "movement")},
        then(MovementPruner, "score", lambda out, *given: -out),
        _MATRIX,
    ),
    Mutant(
        "state pruning reads the weights alone",
        "adamwprune-state",
        {"pruned": ("pruning-score", "bitter0")},
        then(
            StatePruner,
            "score",
            lambda out, self, name, *given: self._parameters[name].detach().float().abs(),
        ),
        _MATRIX,
    ),
    Mutant(
        "global pruning is per layer",
        "pruned-50",
        {"pruned": "sparsity-ramp"},
        edited(MaskPruner, "_scopes", '== "global"', '!= "global"'),
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
        "ramp starts with training",
        "pruned-50",
        {"pruned": "sparsity-ramp"},
        edited(
            PruningOptions,
            "sparsity_at",
            "(progress - self.warmup) / (self.ramp_end - self.warmup)",
            "progress / self.ramp_end",
        ),
    ),
    Mutant(
        "the first chunk of a matrix is ranked",
        "pruned-50",
        {"pruned": "sparsity-ramp"},
        edited(pruners, "bottom_k", "chain(*chunks.values())", "c[0] for c in chunks.values()"),
    ),
    Mutant(
        "ramp ends late",
        "pruned-50",
        {"pruned": "sparsity-ramp"},
        replaced(
            PruningOptions,
            "sparsity_at",
            lambda right: lambda self, progress: right(self, 0.8 * progress),
        ),
    ),
    Mutant(
        "last pruning is missing",
        "pruned-50",
        {"pruned": ("sparsity-ramp", "at step 20 of 26")},
        edited(
            MaskPruner,
            "_is_due",
            "return self._reached < options.target",
            "return step % options.frequency == 0 and self._reached < options.target",
        ),
    ),
    Mutant(
        "frequency is one longer",
        "run",
        {"pruned": ("sparsity-ramp", r"\d+ zeros at step \d+ of 26")},
        edited(MaskPruner, "_is_due", "% options.frequency", "% (options.frequency + 1)"),
        defconfig=_SINGLE,
        settings={"PRUNING_MAGNITUDE": True, "PRUNING_FREQUENCY": 2},
    ),
    Mutant(
        "frequency is ignored",
        "pruned-50",
        {"pruned": ("sparsity-ramp", r"\d+ zeros at step \d+ of 26")},
        edited(MaskPruner, "_is_due", "step % options.frequency == 0", "True"),
    ),
    Mutant(
        "count of pruned weights is rounded down",
        "pruned-50",
        {"pruned": "sparsity-ramp"},
        edited(MaskPruner, "_update_masks", "round(", "int("),
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
        {"pruned": ("pruned-weight", "gradient 0 of .* at step")},
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
            train,
            "optimizer_step",
            "    session.state.pruner.mask_gradients()\n    norms = _gradient_norms(parameters)",
            "    norms = _gradient_norms(parameters)\n    session.state.pruner.mask_gradients()",
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
        "magnitude has a sign",
        "pruned-50",
        {"pruned": ("pruning-order", "magnitude")},
        edited(MagnitudePruner, "score", ".abs()", ".clone()"),
    ),
    Mutant(
        "movement reads clipped gradients",
        "adamw-movement",
        {"pruned": "driven-update"},
        edited(
            train,
            "optimizer_step",
            "    session.state.pruner.observe(measured.gradient_norm)\n",
            "    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, measured.gradient_norm)\n"
            "    session.state.pruner.observe(measured.gradient_norm)\n",
        ),
        _MATRIX,
    ),
    Mutant(
        "layer profile is reversed",
        "run",
        {"pruned": "sparsity-ramp"},
        then(StateOptions, "layer_sparsities", lambda out, *given: out[::-1]),
        _SINGLE,
        settings={"OPTIMIZER_ADAMWPRUNE": True, "ADAMWPRUNE_VARIANT_BITTER4": True},
    ),
    Mutant(
        "layer profile has a lower cap",
        "run",
        {"pruned": "pruning-order"},
        lambda patch: patch.setattr(options, "MAX_LAYER_SPARSITY", 0.9),
        _SINGLE,
        settings={
            "OPTIMIZER_ADAMWPRUNE": True,
            "ADAMWPRUNE_VARIANT_BITTER4": True,
            "PRUNING_SPARSITY": "0.8",
        },
    ),
    Mutant(
        "variant has another formula",
        "run",
        {"pruned": ("pruning-order", "state")},
        lambda patch: patch.setitem(pruners.SCORES, "bitter7", pruners.SCORES["bitter3"]),
        _SINGLE,
        settings={"OPTIMIZER_ADAMWPRUNE": True, "ADAMWPRUNE_VARIANT_BITTER7": True},
    ),
    Mutant(
        "variant has another scope",
        "run",
        {"pruned": "sparsity-ramp"},
        _variant("bitter4", scope="global"),
        _SINGLE,
        settings={"OPTIMIZER_ADAMWPRUNE": True, "ADAMWPRUNE_VARIANT_BITTER4": True},
    ),
    Mutant(
        "variant has another ramp",
        "adamwprune-state",
        {"pruned": "sparsity-ramp"},
        _variant("bitter0", ramp="cubic"),
        _MATRIX,
    ),
    Mutant(
        "weights of a hybrid score are swapped",
        "run",
        {"pruned": ("pruning-order", "state")},
        lambda patch: patch.setitem(
            pruners.SCORES,
            "bitter9",
            lambda w, m, v: 0.1 * pruners._mobile(w, m, v) + pruners._growing(w, m, v),
        ),
        _SINGLE,
        settings={"OPTIMIZER_ADAMWPRUNE": True, "ADAMWPRUNE_VARIANT_BITTER9": True},
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
        "resumed pruner forgets the sparsity",
        "pruned-50",
        {"pruned": ("sparsity-ramp", "at step 13 of 26")},
        then(
            MaskPruner, "load_state_dict", lambda out, self, *given: vars(self).update(_reached=0.0)
        ),
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
    Mutant(
        "the recorded sparsity counts weights that remain",
        "pruned-50",
        {"pruned": "recorded-sparsity"},
        then(MaskPruner, "sparsity", lambda share, *given: 1.0 - share),
    ),
    Mutant(
        "a run without pruning records a sparsity",
        "baseline",
        {"evaluated": ("final-result", "^sparsity 0 ")},
        then(NonePruner, "sparsity", lambda share, *given: 1.0),
    ),
    Mutant(
        "sparsity by layer counts weights that remain",
        "pruned-50",
        {"evaluated": ("final-result", "prunable matrices")},
        then(
            MaskPruner, "sparsity_by_layer", lambda out, *given: {n: 1 - s for n, s in out.items()}
        ),
    ),
)
