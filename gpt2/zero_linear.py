"""Linear layer initialized to zero."""

from torch import nn


class ZeroInitLinear(nn.Linear):
    """Linear layer with zero initial weights, so that a new branch starts without effect."""
