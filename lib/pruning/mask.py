"""Gradual pruning by masks: all of a pruner but its score."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lib.optim.groups import embeddings, matrices
from lib.pruning.lowest import lowest
from lib.pruning.options import PruningOptions


class Unprunable(nn.Module):
    """A module that inherits this keeps all its weights: a gate, say, which zeros would shift."""


class PaddedEmbedding(nn.Embedding):
    """A table whose rows from ``used_rows`` on are padding: they have no part in anything.

    They are zero without any pruning, so they neither count as pruned nor as prunable.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, used_rows: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.used_rows = used_rows


def prunable_parameters(model: nn.Module, include_embeddings: bool) -> dict[str, nn.Parameter]:
    """Matrices, with embeddings (and a tied head) only where asked for, by name.

    Norms, biases and scalars have fewer than two dimensions and are never pruned, nor are the
    matrices of an ``Unprunable`` module.
    """
    kept = {id(p) for m in model.modules() if isinstance(m, Unprunable) for p in m.parameters()}
    found = {name: p for name, p in matrices(model).items() if id(p) not in kept}
    return found | embeddings(model) if include_embeddings else found


class MaskPruner(ABC):
    """Zeroes the weights that score lowest, more of them along the ramp, and never revives one.

    ``masks`` are boolean, True where a weight is alive. A pruned weight scores −∞, so each update
    keeps all that earlier ones pruned.
    """

    def __init__(self, model: nn.Module, options: PruningOptions) -> None:
        self._parameters = prunable_parameters(model, options.include_embeddings)
        self._options = options
        tables = [m for m in model.modules() if isinstance(m, PaddedEmbedding)]
        self._used_rows = {id(table.weight): table.used_rows for table in tables}
        self.masks = {
            name: torch.ones_like(p, dtype=torch.bool) for name, p in self._parameters.items()
        }
        # The sparsity of the last update; 0 before the first.
        self._reached = 0.0

    @abstractmethod
    def score(self, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """New float32 scores of one parameter, of its shape; a high one keeps its weight."""

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Zero the gradients of pruned weights; after backward, before the norm is taken."""
        if self._reached == 0.0:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                parameter.grad.mul_(self.masks[name])

    def observe(self, gradient_norm: torch.Tensor) -> None:
        """Nothing: most scores are read when masks are updated."""

    @torch.no_grad()
    def after_step(self, step: int, progress: float, optimizer: torch.optim.Optimizer) -> None:
        """Update the masks when due, and zero pruned weights; see ``Pruner``."""
        if self._is_due(step, progress):
            self._reached = self._options.sparsity_at(progress)
            self._update_masks(optimizer)
            self._mask_state(optimizer)
        if self._reached > 0.0:
            for name, parameter in self._parameters.items():
                parameter.mul_(self.masks[name])

    def sparsity(self) -> float:
        """Zeros among the prunable weights, measured; 0 where nothing is prunable."""
        zeros = sum(int((used == 0).sum()) for used in self._used_parameters().values())
        return zeros / max(1, sum(self.prunable_weights().values()))

    def sparsity_by_layer(self) -> dict[str, float]:
        """Zeros of each prunable parameter, measured."""
        used = self._used_parameters()
        return {name: int((p == 0).sum()) / p.numel() for name, p in used.items()}

    def prunable_weights(self) -> dict[str, int]:
        """Size of each prunable parameter, without padding."""
        return {name: p.numel() for name, p in self._used_parameters().items()}

    def state_dict(self) -> dict[str, Any]:
        """The masks and how far the ramp has come."""
        return {"reached": self._reached, "masks": dict(self.masks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
        assert state_dict["masks"].keys() == self.masks.keys(), "masks of another model"
        self._reached = state_dict["reached"]
        for name, mask in state_dict["masks"].items():
            self.masks[name].copy_(mask)

    def _is_due(self, step: int, progress: float) -> bool:
        """Every ``frequency`` steps inside the ramp, and once as soon as it has ended."""
        options = self._options
        if progress >= options.ramp_end:
            return self._reached < options.target
        return progress > options.warmup and step % options.frequency == 0

    def _update_masks(self, optimizer: torch.optim.Optimizer) -> None:
        """Scores are kept while they are ranked: one float32 copy, when no activation is alive."""
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
        """A tensor of the shape of a parameter without the rows of its padding."""
        return tensor[: self._used_rows.get(id(self._parameters[name]), len(tensor))]

    def _used_parameters(self) -> dict[str, torch.Tensor]:
        return {name: self._used(name, p.detach()) for name, p in self._parameters.items()}

    def _scopes(self) -> Iterator[tuple[list[str], float]]:
        """Groups of parameters that share a threshold, and the sparsity of each now."""
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
        """Zero what the optimizer remembers of pruned weights: moments and the like.

        Gradients are zero from here on, so these stay zero between updates.
        """
        for name, parameter in self._parameters.items():
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    value.mul_(self.masks[name])
