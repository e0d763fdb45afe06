"""Weights rounded to a few bits and back: what a model then computes with.

Rounded are the matrices of linear maps in the blocks. Embeddings, and the head that is tied to them,
norms, biases and constants of mechanisms stay as they are. Only weights are rounded: products are
computed in the run's own precision from the values that the bits stand for.

Shapes: O outputs, I inputs of a linear map.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.model import GPT
from gpt2.quantized.options import FOUR_BITS, PACKAGE

_INT8_MAX = 127
# Numbers that share a scale (Dettmers et al., "QLoRA", 2023, section 3).
_BLOCK = 64
_FP32_BYTES = 4

# What a weight [O, I] becomes, and the bytes that it is stored in.
RoundTrip = Callable[[Tensor], tuple[Tensor, int]]


@dataclass(frozen=True)
class Rounded:
    """What became of a model's weights."""

    scheme: str
    # Numbers that were rounded, and those that were not.
    quantized_parameters: int
    full_precision_parameters: int
    # What all weights take when they are stored so.
    stored_bytes: int

    def record(self) -> dict[str, Any]:
        """JSON types, for the summary."""
        four_bits = self.scheme in FOUR_BITS
        return {
            "quantization_enabled": self.scheme != "none",
            "quantization_scheme": f"4bit_{self.scheme}" if four_bits else self.scheme,
            "bnb_compute_dtype": "float32" if four_bits else None,
            "bnb_double_quant": False if four_bits else None,
            "bnb_version": version(PACKAGE) if four_bits else None,
            "quantized_parameters": self.quantized_parameters,
            "full_precision_parameters": self.full_precision_parameters,
            "stored_bytes": self.stored_bytes,
        }


@torch.no_grad()
def quantize(model: GPT, scheme: str) -> Rounded:
    """Round the weights of ``model`` in place, on the device that they are on."""
    rounded = stored = 0
    if scheme != "none":
        round_trip = int8_round_trip if scheme == "int8" else _four_bits(scheme)
        for module in model.h.modules():
            if isinstance(module, nn.Linear):
                values_OI, taken = round_trip(module.weight)
                module.weight.copy_(values_OI)
                rounded, stored = rounded + values_OI.numel(), stored + taken
    rest = model.num_params() - rounded
    return Rounded(scheme, rounded, rest, stored + rest * _FP32_BYTES)


def int8_round_trip(weight_OI: Tensor) -> tuple[Tensor, int]:
    """Each output's weights as 8-bit integers times a scale, their largest magnitude / 127."""
    scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / _INT8_MAX
    # Zeros alone stay zeros.
    codes_OI = torch.round(weight_OI / torch.where(scale_O1 > 0, scale_O1, 1.0)).to(torch.int8)
    return codes_OI * scale_O1, codes_OI.numel() + scale_O1.numel() * _FP32_BYTES


def _four_bits(kind: str) -> RoundTrip:
    """Blocks of 64 numbers as codes of four bits times a scale, their largest magnitude."""
    # On a CPU it asks for a package that would be faster at products, which are not its here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Imported here: an extra.
    from bitsandbytes import functional

    def round_trip(weight_OI: Tensor) -> tuple[Tensor, int]:
        numbers = weight_OI.numel()
        # A row for each block: on a CPU, bitsandbytes 0.50 unpacks matrices whose rows are not
        # whole blocks with the scales of others.
        blocks = F.pad(weight_OI.flatten(), (0, -numbers % _BLOCK)).view(-1, _BLOCK)
        codes, state = functional.quantize_4bit(
            blocks, blocksize=_BLOCK, compress_statistics=False, quant_type=kind
        )
        values = functional.dequantize_4bit(codes, state).flatten()[:numbers]
        taken = codes.numel() + state.absmax.numel() * _FP32_BYTES
        return values.view_as(weight_OI), taken

    return round_trip
