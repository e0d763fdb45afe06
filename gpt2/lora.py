"""Low-rank adapters beside frozen matrices (LoRA), y = x Wᵀ + α/r · drop(x) Aᵀ Bᵀ; and their merge.

The frozen matrices may be stored as codes of 8 or 4 bits (QLoRA). O outputs, I inputs of a matrix, R rank.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from gpt2.attention.projections import AdaptableLinear, ZeroInitLinear
from gpt2.quantized.codes import decode, encode
from gpt2.weights.options import LoraOptions


class Adapter(nn.Module):
    """Low-rank product α/r · B A beside a matrix; B is 0 at first."""

    def __init__(self, inputs: int, outputs: int, options: LoraOptions) -> None:
        super().__init__()
        self.scale = options.scale
        self.dropout = nn.Dropout(options.dropout)
        self.down = nn.Linear(inputs, options.rank, bias=False)
        self.up = ZeroInitLinear(options.rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.up(self.down(self.dropout(x)))
        return out

    @classmethod
    def add_to(cls, model: nn.Module, blocks: Sequence[nn.Module], options: LoraOptions) -> None:
        """Freeze the parameters of ``model``, and add adapters to the matrices of its ``blocks``."""
        model.requires_grad_(False)
        for block in blocks:
            for name in options.matrices:
                layer = cast(AdaptableLinear, block.get_submodule(name))
                layer.adapter = cls(layer.in_features, layer.out_features, options)


class CodedMatrix(nn.Module):
    """Frozen matrix that is stored as codes and their scales; its forward pass returns the matrix."""

    def __init__(self, weight_OI: Tensor, scheme: str) -> None:
        super().__init__()
        packed, scales = encode(weight_OI, scheme)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.scheme, self.shape = scheme, weight_OI.shape
        self.elements = weight_OI.numel()

    def forward(self) -> Tensor:
        """Return the matrix in the dtype of the scales."""
        return decode(self.packed, self.scales, self.scheme, *self.shape).to(self.scales.dtype)


@torch.no_grad()
def store_base(model: nn.Module, adapters: Sequence[LoraOptions]) -> None:
    """Store the frozen matrices of the blocks as the options of the ``adapters`` say."""
    for options in adapters:
        layers = [m for m in model.modules() if isinstance(m, AdaptableLinear)]
        for layer in layers if options.base != "fp32" else ():
            layer.codes = codes = CodedMatrix(layer.weight, options.base)
            stored = sum(parameter.numel() for parameter in codes.parameters())
            layer.elements_in_codes = codes.elements - stored
            layer.register_parameter("weight", None)


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the model without adapters that computes the same, W + α/r · B A."""
    weights = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not any(part in name for part in (".adapter.", ".codes."))
    }
    for name, layer in model.named_modules():
        if isinstance(layer, AdaptableLinear):
            matrix_OI = layer.weight if layer.codes is None else layer.codes()
            if isinstance(layer.adapter, Adapter):
                product_OI = layer.adapter.up.weight @ layer.adapter.down.weight
                matrix_OI = matrix_OI + layer.adapter.scale * product_OI
            weights[f"{name}.weight"] = matrix_OI.detach()
    return weights


def reference_matrix(
    weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, options: LoraOptions
) -> Tensor:
    """Return W + α/r · B A, the sum of one product of a column and a row after the other."""
    for r in range(options.rank):
        weight_OI = weight_OI + options.alpha / options.rank * up_OR[:, r, None] * down_RI[None, r]
    return weight_OI


MODULES = {LoraOptions: Adapter}
REFERENCES = {LoraOptions: reference_matrix}
