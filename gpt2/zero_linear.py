"""A linear map that training starts at zero."""

from torch import nn


class ZeroLinear(nn.Linear):
    """A gate's, say: until it has learned, what it is added to stands alone."""
