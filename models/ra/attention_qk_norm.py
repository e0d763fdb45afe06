"""QK-norm: queries and keys divided by their root mean square per head; and its formula.

B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_components import QueryKeyTransform
from .attention_options import QkNormOptions
from .shape import ModelShape

_EPSILON = 1e-6


class QkNorm(QueryKeyTransform):
    """RMSNorm per head, with a learnable scale per element for queries and one for keys."""

    def __init__(self, shape: ModelShape, options: QkNormOptions) -> None:
        super().__init__()
        self.q_scale = nn.Parameter(torch.ones(shape.head_dim))
        self.k_scale = nn.Parameter(torch.ones(shape.head_dim))

    def queries(self, q_BNTH: Tensor) -> Tensor:
        return _normalized(q_BNTH, self.q_scale)

    def keys(self, k_BKTH: Tensor) -> Tensor:
        return _normalized(k_BKTH, self.k_scale)


def _normalized(x_BNTH: Tensor, scale_H: Tensor) -> Tensor:
    """Return g ⊙ x / √(mean x² + ε), computed in fp32 or wider, in the dtype of ``x``."""
    wide = torch.promote_types(x_BNTH.dtype, torch.float32)
    normed_BNTH = F.rms_norm(x_BNTH.to(wide), scale_H.shape, scale_H.to(wide), _EPSILON)
    return normed_BNTH.to(x_BNTH.dtype)


def reference_norm(
    x_BNTH: Tensor, side: str, parameters: Mapping[str, Tensor], options: QkNormOptions
) -> Tensor:
    """Return the queries (``side`` q) or keys (k) of one head after the other."""
    heads = []
    for x_BTH in x_BNTH.unbind(1):
        mean_square = (x_BTH * x_BTH).sum(-1, keepdim=True) / x_BTH.shape[-1]
        heads.append(x_BTH / torch.sqrt(mean_square + 1e-6) * parameters[f"{side}_scale"])
    return torch.stack(heads, 1)
