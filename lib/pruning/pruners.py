"""Pruners of the trainer: masks along a ramp, and the scores that rank the weights.

w is a weight, m and v are the optimizer's ``exp_avg`` and ``exp_avg_sq``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lib.env.sharded import local, placed_like, sum_over_shards, whole
from lib.optim.optimizers import embedding_parameters, matrix_parameters
from lib.pruning.layers import NeverPruned, PaddedEmbedding, PaddedHead
from lib.pruning.options import (
    MagnitudeOptions,
    MovementOptions,
    NoneOptions,
    PruningOptions,
    StateOptions,
)


class Pruner:
    """Interface of a pruner, which prunes nothing.

    In each optimizer step, the trainer runs backward, calls ``mask_gradients`` and ``observe``,
    clips the gradients, steps the optimizer and calls ``after_step``. Gradients are those of the
    global batch: accumulated, and averaged over processes.
    """

    def mask_gradients(self) -> None:
        """Zero the gradients of pruned weights, so that they affect no norm and no moment."""

    def observe(self, gradient_norm: Tensor) -> None:
        """Collect score statistics from unclipped gradients and the weights before the update.

        ``gradient_norm`` is non-finite if the step is about to be skipped (fp16 overflow).
        """

    def after_step(self, step: int, progress: float, optimizer: Optimizer) -> None:
        """Prune if due, and set pruned weights to zero.

        ``step`` counts completed optimizer steps (1 after the first), ``progress`` is the fraction
        of the budget used, this step included.
        """

    def sparsity(self) -> float:
        """Return the measured fraction of prunable weights that are zero; waits for the device."""
        return 0.0

    def sparsity_by_layer(self) -> dict[str, float]:
        return {}

    def prunable_weights(self) -> dict[str, int]:
        """Return the number of prunable weights of each prunable parameter, without padding."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict, "pruner state loaded into a run without pruning"


# Exact bottom-k selection over very many scores, without sorting or concatenating them: torch.kthvalue
# is not deterministic on a GPU, and a sort needs four times the memory.
#
# The bits of float32 numbers, read as integers with the negative ones flipped, have the same order as
# the numbers. Two 16-bit histograms, the second inside the bin selected by the first, therefore give
# the exact k-th lowest score over any number of tensors.


_BITS = 16
_BINS = 1 << _BITS
# Elements per chunk: bounds temporaries, but each chunk is a kernel launch on a GPU.
CHUNK_ELEMENTS = 1 << 20


def bottom_k(
    scores: Mapping[str, Tensor], count: int, chunk_elements: int = CHUNK_ELEMENTS
) -> Iterator[tuple[str, Tensor]]:
    """Yield, for each name, a boolean mask of the scores among the ``count`` lowest of all scores.

    Scores are float32. Ties at the threshold are selected in the order of the mapping and, within a
    tensor, of the flattened elements: exactly ``count`` are selected, and the result is
    deterministic.
    """
    chunks = {name: tensor.view(-1).split(chunk_elements) for name, tensor in scores.items()}
    joined = list(chain(*chunks.values()))
    digit, _, _ = _rank((_keys(c) >> _BITS for c in joined), -_BINS // 2, count)
    first = digit * _BINS
    # Keys outside the bin are clamped to the values just below and just above the bin.
    clamped = (_keys(c).clamp(first - 1, first + _BINS) for c in joined)
    threshold, below, equal = _rank(clamped, first - 1, count)
    ties = count - below
    if ties == equal:
        threshold, ties = threshold + 1, 0
    for name, tensor in scores.items():
        selected = torch.empty_like(tensor, dtype=torch.bool)
        for chunk, mask in zip(chunks[name], selected.view(-1).split(chunk_elements), strict=True):
            keys = _keys(chunk)
            torch.lt(keys, threshold, out=mask)
            if ties:
                tied = (keys == threshold).nonzero().flatten()[:ties]
                mask[tied] = True
                ties -= len(tied)
        yield name, selected


def _rank(values: Iterator[Tensor], least: int, count: int) -> tuple[int, int, int]:
    """Return the value of rank ``count`` (from 1), and how many values are below and equal to it.

    ``values`` are integers from ``least`` to ``least + _BINS + 1``.
    """
    counts = (torch.bincount(v - least, minlength=_BINS + 2) for v in values)
    histogram = reduce(torch.add, counts)
    cumulative = histogram.cumsum(0)
    index = int((cumulative < count).sum())
    equal = int(histogram[index])
    return least + index, int(cumulative[index]) - equal, equal


def _keys(scores: Tensor) -> Tensor:
    """Return int32 keys in the order of the float32 ``scores``."""
    assert scores.dtype == torch.float32, "keys are defined for float32 only"
    bits = scores.view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def prunable_parameters(model: nn.Module, include_embeddings: bool) -> dict[str, nn.Parameter]:
    """Return the prunable matrices by name, with embeddings and the head on request.

    Norms, biases and scalars have fewer than two dimensions and are never pruned; neither are the
    matrices of a ``NeverPruned`` module.
    """
    excluded = {
        id(p) for m in model.modules() if isinstance(m, NeverPruned) for p in m.parameters()
    }
    prunable = {name: p for name, p in matrix_parameters(model).items() if id(p) not in excluded}
    if include_embeddings:
        prunable |= embedding_parameters(model)
    # A profile over the matrices follows the model's order.
    return {name: p for name, p in model.named_parameters() if name in prunable}


class MaskPruner(Pruner):
    """Pruner that zeroes the lowest-scoring weights, more of them along the ramp, permanently.

    ``masks`` are boolean, True for remaining weights. A pruned weight scores −∞, so it stays pruned
    in every later update. The score is |w| (Han et al. 2015, arXiv 1506.02626); the others override it.
    """

    # Elements that are ranked at once; the result does not depend on it.
    chunk_elements = CHUNK_ELEMENTS

    def __init__(self, model: nn.Module, options: PruningOptions) -> None:
        self._parameters = prunable_parameters(model, options.include_embeddings)
        self._options = options
        tables = [m for m in model.modules() if isinstance(m, PaddedEmbedding | PaddedHead)]
        self._used_rows = {id(table.weight): table.used_rows for table in tables}
        self.masks = {
            name: torch.ones_like(p, dtype=torch.bool) for name, p in self._parameters.items()
        }
        # Target sparsity of the last update; 0 before the first.
        self._reached = 0.0

    def score(self, name: str, optimizer: Optimizer) -> Tensor:
        """Return new float32 scores in the shape of one parameter; the lowest are pruned."""
        return self._parameters[name].detach().float().abs()

    @torch.no_grad()
    def mask_gradients(self) -> None:
        if self._reached == 0.0:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                parameter.grad.mul_(self.masks[name])

    @torch.no_grad()
    def after_step(self, step: int, progress: float, optimizer: Optimizer) -> None:
        options = self._options
        # Every ``frequency`` steps in the ramp, and once at its end.
        if progress >= options.ramp_end:
            is_due = self._reached < options.target
        else:
            is_due = progress > options.warmup and step % options.frequency == 0
        if is_due:
            self._reached = options.sparsity_at(progress)
            self._update_masks(optimizer)
            self._mask_state(optimizer)
        if self._reached > 0.0:
            for name, parameter in self._parameters.items():
                parameter.mul_(self.masks[name])

    def sparsity(self) -> float:
        return sum(self._zeros().values()) / max(1, sum(self.prunable_weights().values()))

    def sparsity_by_layer(self) -> dict[str, float]:
        sizes = self.prunable_weights()
        return {name: zeros / sizes[name] for name, zeros in self._zeros().items()}

    def prunable_weights(self) -> dict[str, int]:
        return {name: p.numel() - self._padding(p) for name, p in self._parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"reached": self._reached, "masks": dict(self.masks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["masks"].keys() == self.masks.keys(), "masks of another model"
        self._reached = state_dict["reached"]
        for name, mask in state_dict["masks"].items():
            self.masks[name].copy_(placed_like(mask, self.masks[name]))

    def _update_masks(self, optimizer: Optimizer) -> None:
        """Prune the lowest scores of each scope.

        All scores of a scope are in memory while they are ranked: one float32 copy, when no
        activation is alive.
        """
        sizes = self.prunable_weights()
        for names, sparsity in self._scopes(sizes):
            count = round(sparsity * sum(sizes[name] for name in names))
            if not count:
                continue
            scores = {
                name: self._used(name, whole(self._alive_score(name, optimizer))) for name in names
            }
            for name, pruned in bottom_k(scores, count, self.chunk_elements):
                mask = whole(self.masks[name])
                torch.logical_not(pruned, out=self._used(name, mask))
                self.masks[name].copy_(placed_like(mask, self.masks[name]))

    def _scopes(self, sizes: Mapping[str, int]) -> Sequence[tuple[Sequence[str], float]]:
        """Return groups of parameters with a common threshold, and each group's current sparsity."""
        if self._options.scope == "global":
            return [(list(sizes), self._reached)]
        shares = self._options.layer_sparsities(self._reached, list(sizes.values()))
        return [([name], share) for name, share in zip(sizes, shares, strict=True)]

    def _alive_score(self, name: str, optimizer: Optimizer) -> Tensor:
        return self.score(name, optimizer).masked_fill_(~self.masks[name], -torch.inf)

    def _used(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor``, in the shape of a parameter, without padding rows."""
        return tensor[: self._used_rows.get(id(self._parameters[name]), len(tensor))]

    def _padding(self, parameter: Tensor) -> int:
        """Return the number of elements in padding rows."""
        rows = len(parameter)
        return (rows - self._used_rows.get(id(parameter), rows)) * (parameter.numel() // rows)

    def _zeros(self) -> dict[str, int]:
        """Return the number of zeros of each parameter, without its padding, which is all zero."""
        if not self._parameters:
            return {}
        counts = [(local(p.detach()) == 0).sum() for p in self._parameters.values()]
        like = next(iter(self._parameters.values()))
        totals = sum_over_shards(torch.stack(counts), like).tolist()
        return {
            name: total - self._padding(p)
            for (name, p), total in zip(self._parameters.items(), totals, strict=True)
        }

    def _mask_state(self, optimizer: Optimizer) -> None:
        """Zero the optimizer state of pruned weights, such as moments.

        Their gradients are zero from now on, so the state stays zero between updates.
        """
        for name, parameter in self._parameters.items():
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    value.mul_(self.masks[name])


class MovementPruner(MaskPruner):
    """Pruner of the weights that training moves towards zero (Sanh et al. 2020, arXiv 2005.07683).

    S ← S − g w at every optimizer step: g is the unclipped gradient of the loss, w the weight before
    the update. A score is high if the loss decreases as the weight grows away from zero.
    """

    def __init__(self, model: nn.Module, options: MovementOptions) -> None:
        super().__init__(model, options)
        self._scores = {
            name: torch.zeros_like(p, dtype=torch.float32) for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def observe(self, gradient_norm: Tensor) -> None:
        """Add this step's −g w to the scores; a step that will be skipped adds nothing."""
        skipped = ~torch.isfinite(gradient_norm)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                product = parameter.grad.float() * parameter
                self._scores[name].sub_(product.masked_fill_(skipped, 0.0))

    def score(self, name: str, optimizer: Optimizer) -> Tensor:
        return self._scores[name].clone()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"scores": dict(self._scores)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``. Raises KeyError if it belongs to another pruner."""
        super().load_state_dict(state_dict)
        for name, scores in state_dict["scores"].items():
            self._scores[name].copy_(placed_like(scores, self._scores[name]))


_EPS = 1e-8


def _growing(w: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """Return −sign(w) m / (√v + ε): positive if the next step moves the weight away from zero."""
    return -w.sign() * m / (v.sqrt() + _EPS)


def _mobile(w: Tensor, m: Tensor, v: Tensor) -> Tensor:
    return w.abs() * (m.abs() + _EPS).sqrt()


# The published variants shift possibly negative scores until all are at least 0. A common offset changes
# no ranking, and pruned weights are marked by −∞, so scores are not shifted here.
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bitter0": lambda w, m, v: (w * m).abs() * (w.abs() / (v.sqrt() + _EPS)),
    "bitter1": lambda w, m, v: w.abs(),
    "bitter2": lambda w, m, v: w.abs(),
    "bitter3": _mobile,
    "bitter4": _mobile,
    "bitter5": lambda w, m, v: _growing(w, m, v) + 0.1 * w.abs(),
    "bitter6": lambda w, m, v: _mobile(w, m, v) * m.abs() / (v + _EPS).sqrt(),
    "bitter7": lambda w, m, v: w.abs() * (v + _EPS).pow(0.25),
    "bitter8": _mobile,
    "bitter9": lambda w, m, v: _mobile(w, m, v) + 0.1 * _growing(w, m, v),
}


class StatePruner(MaskPruner):
    """Pruner by a score of the configured variant, from the weights and Adam's moments."""

    _options: StateOptions

    def score(self, name: str, optimizer: Optimizer) -> Tensor:
        """Return the variant's score as float32; moments are 0 if there was no gradient yet."""
        parameter = self._parameters[name]
        w = parameter.detach().float()
        state = optimizer.state.get(parameter)
        if not state:
            m = v = torch.zeros_like(w)
        else:
            m, v = state["exp_avg"].float(), state["exp_avg_sq"].float()
            if self._options.variant == "bitter8":
                m = m / (1.0 - _beta1(optimizer, parameter) ** state["step"].clamp(min=1))
        return SCORES[self._options.variant](w, m, v)


def _beta1(optimizer: Optimizer, parameter: Tensor) -> float:
    """Return β1 of the parameter group that contains ``parameter``."""
    groups = optimizer.param_groups
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    return float(group["betas"][0])


MODULES: dict[type[Any], Callable[[nn.Module, Any], Pruner]] = {
    NoneOptions: lambda model, options: Pruner(),
    MagnitudeOptions: MaskPruner,
    MovementOptions: MovementPruner,
    StateOptions: StatePruner,
}


def build_pruner(options: NoneOptions, model: nn.Module) -> Pruner:
    return MODULES[type(options)](model, options)
