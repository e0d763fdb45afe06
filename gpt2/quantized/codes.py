"""Codes of 8 or 4 bits for a matrix, with the scales that decode them.

O outputs, I inputs of a linear layer; K blocks of E = 64 elements.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.quantized.options import FOUR_BIT_SCHEMES, missing_package
from lib.errors import PreflightError

_INT8_MAX = 127
# Elements that share a scale (Dettmers et al., "QLoRA", 2023, section 3).
_BLOCK = 64


def encode(weight_OI: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Return codes and fp32 scales of a matrix in the scheme int8, nf4 or fp4.

    int8 has a code [O, I] per element, and a scale [O, 1] per row, its largest magnitude / 127. Four
    bits have codes [K, 32] of two elements, and a scale [K], the largest magnitude of a block.
    """
    wide_OI = weight_OI.float()
    if scheme == "int8":
        scale_O1 = wide_OI.abs().amax(dim=1, keepdim=True) / _INT8_MAX
        # A row of zeros has scale 0; avoid dividing by it.
        codes_OI = torch.round(wide_OI / torch.where(scale_O1 > 0, scale_O1, 1.0))
        return codes_OI.to(torch.int8), scale_O1
    # One row per block: on a CPU, bitsandbytes 0.50 applies wrong scales if the row length is
    # not a multiple of the block size.
    blocks_KE = F.pad(wide_OI.flatten(), (0, -wide_OI.numel() % _BLOCK)).view(-1, _BLOCK)
    codes, state = _four_bits().quantize_4bit(
        blocks_KE, blocksize=_BLOCK, compress_statistics=False, quant_type=scheme
    )
    return codes.view(len(blocks_KE), -1), state.absmax


def decode(codes: Tensor, scales: Tensor, scheme: str, outputs: int, inputs: int) -> Tensor:
    """Return the fp32 matrix [outputs, inputs] of the codes."""
    if scheme == "int8":
        return codes * scales.float()
    functional = _four_bits()
    state = functional.QuantState(
        absmax=scales.float(),
        shape=(len(scales), _BLOCK),
        blocksize=_BLOCK,
        quant_type=scheme,
        dtype=torch.float32,
    )
    values = functional.dequantize_4bit(codes.view(-1, 1), state)
    return values.flatten()[: outputs * inputs].view(outputs, inputs)


def _four_bits() -> Any:
    """Return the functions of bitsandbytes. Raises PreflightError if the package is missing."""
    # On a CPU it warns about a package with faster products, which are not used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Imported here: an extra.
    try:
        from bitsandbytes import functional
    except ModuleNotFoundError:
        if problems := missing_package(FOUR_BIT_SCHEMES[:1], ""):
            raise PreflightError(*problems) from None
        raise
    return functional
