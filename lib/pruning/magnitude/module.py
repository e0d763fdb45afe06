"""Magnitude pruning (Han et al. 2015, arXiv 1506.02626), gradual as in arXiv 1710.01878."""

import torch

from lib.pruning.mask import MaskPruner


class MagnitudePruner(MaskPruner):
    """Pruner that retains the weights of largest |w|."""

    def score(self, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return |w| as float32."""
        return self._parameters[name].detach().float().abs()
