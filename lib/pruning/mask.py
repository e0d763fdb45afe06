"""Gradual mask pruning: everything but the score function of a pruner."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lib.optim.groups import embeddings, matrices
from lib.pruning.lowest import lowest
from lib.pruning.options import PruningOptions


class Unprunable(nn.Module):
    """Base class of modules whose weights are never pruned, such as a gate (zeros shift it)."""


class PaddedEmbedding(nn.Embedding):
    """Embedding table with unused padding rows from ``used_rows`` on.

    Padding rows are zero without any pruning, so they count neither as pruned nor as prunable.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, used_rows: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.used_rows = used_rows


def prunable_parameters(model: nn.Module, include_embeddings: bool) -> dict[str, nn.Parameter]:
    """Return the prunable matrices by name, with embeddings (and a tied head) on request.

    Norms, biases and scalars have fewer than two dimensions and are never pruned; neither are the
    matrices of an ``Unprunable`` module.
    """
    excluded = {id(p) for m in model.modules() if isinstance(m, Unprunable) for p in m.parameters()}
    prunable = {name: p for name, p in matrices(model).items() if id(p) not in excluded}
    return prunable | embeddings(model) if include_embeddings else prunable


class MaskPruner(ABC):
    """Pruner that zeroes the lowest-scoring weights, more of them along the ramp, permanently.

    ``masks`` are boolean, True for remaining weights. A pruned weight scores −∞, so it stays pruned
    in every later update.
    """

    def __init__(self, model: nn.Module, options: PruningOptions) -> None:
        self._parameters = prunable_parameters(model, options.include_embeddings)
        self._options = options
        tables = [m for m in model.modules() if isinstance(m, PaddedEmbedding)]
        self._used_rows = {id(table.weight): table.used_rows for table in tables}
        self.masks = {
            name: torch.ones_like(p, dtype=torch.bool) for name, p in self._parameters.items()
        }
        # Target sparsity of the last update; 0 before the first.
        self._reached = 0.0

    @abstractmethod
    def score(self, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return new float32 scores in the shape of one parameter; the lowest are pruned."""

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Zero the gradients of pruned weights; call after backward, before computing the norm."""
        if self._reached == 0.0:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                parameter.grad.mul_(self.masks[name])

    def observe(self, gradient_norm: torch.Tensor) -> None:
        """Do nothing: most scores need no per-step statistics."""

    @torch.no_grad()
    def after_step(self, step: int, progress: float, optimizer: torch.optim.Optimizer) -> None:
        """Update the masks if due, and zero pruned weights; see ``Pruner``."""
        if self._is_due(step, progress):
            self._reached = self._options.sparsity_at(progress)
            self._update_masks(optimizer)
            self._mask_state(optimizer)
        if self._reached > 0.0:
            for name, parameter in self._parameters.items():
                parameter.mul_(self.masks[name])

    def sparsity(self) -> float:
        """Return the measured fraction of zeros among prunable weights, 0 without such weights."""
        zeros = sum(int((used == 0).sum()) for used in self._used_parameters().values())
        return zeros / max(1, sum(self.prunable_weights().values()))

    def sparsity_by_layer(self) -> dict[str, float]:
        """Return the measured fraction of zeros of each prunable parameter."""
        used = self._used_parameters()
        return {name: int((p == 0).sum()) / p.numel() for name, p in used.items()}

    def prunable_weights(self) -> dict[str, int]:
        """Return the size of each prunable parameter, without padding."""
        return {name: p.numel() for name, p in self._used_parameters().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and the sparsity reached."""
        return {"reached": self._reached, "masks": dict(self.masks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        assert state_dict["masks"].keys() == self.masks.keys(), "masks of another model"
        self._reached = state_dict["reached"]
        for name, mask in state_dict["masks"].items():
            self.masks[name].copy_(mask)

    def _is_due(self, step: int, progress: float) -> bool:
        """Return whether to prune: every ``frequency`` steps in the ramp, and once at its end."""
        options = self._options
        if progress >= options.ramp_end:
            return self._reached < options.target
        return progress > options.warmup and step % options.frequency == 0

    def _update_masks(self, optimizer: torch.optim.Optimizer) -> None:
        """Prune the lowest scores of each scope.

        All scores of a scope are in memory while they are ranked: one float32 copy, when no
        activation is alive.
        """
        sizes = self.prunable_weights()
        for names, sparsity in self._scopes():
            count = round(sparsity * sum(sizes[name] for name in names))
            if count:
                scores = {
                    name: self._used(name, self._alive_score(name, optimizer)) for name in names
                }
                for name, pruned in lowest(scores, count):
                    torch.logical_not(pruned, out=self._used(name, self.masks[name]))

    def _alive_score(self, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        return self.score(name, optimizer).masked_fill_(~self.masks[name], -torch.inf)

    def _used(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, in the shape of a parameter, without padding rows."""
        return tensor[: self._used_rows.get(id(self._parameters[name]), len(tensor))]

    def _used_parameters(self) -> dict[str, torch.Tensor]:
        return {name: self._used(name, p.detach()) for name, p in self._parameters.items()}

    def _scopes(self) -> Iterator[tuple[list[str], float]]:
        """Yield groups of parameters with a common threshold, and each group's current sparsity."""
        names = list(self._parameters)
        if self._options.scope == "global":
            yield names, self._reached
            return
        sizes = list(self.prunable_weights().values())
        for name, sparsity in zip(
            names, self._options.layer_sparsities(self._reached, sizes), strict=True
        ):
            yield [name], sparsity

    def _mask_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Zero the optimizer state of pruned weights, such as moments.

        Their gradients are zero from now on, so the state stays zero between updates.
        """
        for name, parameter in self._parameters.items():
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    value.mul_(self.masks[name])
