"""Post-training quantization of weights: round to a few bits and dequantize.

Quantized are the matrices of linear layers in the blocks. Embeddings, the head tied to them, norms,
biases and constants of mechanisms are unchanged. Only weights are quantized: products are computed
in the precision of the run from the dequantized values.

Shapes: O outputs, I inputs of a linear layer.
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
# Elements that share a scale (Dettmers et al., "QLoRA", 2023, section 3).
_BLOCK = 64
_FP32_BYTES = 4

# Maps a weight [O, I] to its dequantized values and their storage size in bytes.
RoundTrip = Callable[[Tensor], tuple[Tensor, int]]


@dataclass(frozen=True)
class Rounded:
    """Result of quantizing a model: parameter counts and storage size."""

    scheme: str
    # Quantized elements, and the remaining ones.
    quantized_parameters: int
    full_precision_parameters: int
    # Storage size of all weights.
    stored_bytes: int

    def record(self) -> dict[str, Any]:
        """Return the result as JSON types, for the summary."""
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
    """Quantize the weights of ``model`` in place, on their device."""
    rounded = stored = 0
    if scheme != "none":
        round_trip = int8_round_trip if scheme == "int8" else _four_bits(scheme)
        for module in model.h.modules():
            if isinstance(module, nn.Linear):
                values_OI, size = round_trip(module.weight)
                module.weight.copy_(values_OI)
                rounded, stored = rounded + values_OI.numel(), stored + size
    rest = model.num_params() - rounded
    return Rounded(scheme, rounded, rest, stored + rest * _FP32_BYTES)


def int8_round_trip(weight_OI: Tensor) -> tuple[Tensor, int]:
    """Return the dequantized int8 weights and their storage size in bytes.

    Each output has one scale: its largest magnitude / 127.
    """
    scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / _INT8_MAX
    # A row of zeros has scale 0; avoid dividing by it.
    codes_OI = torch.round(weight_OI / torch.where(scale_O1 > 0, scale_O1, 1.0)).to(torch.int8)
    return codes_OI * scale_O1, codes_OI.numel() + scale_O1.numel() * _FP32_BYTES


def _four_bits(kind: str) -> RoundTrip:
    """Return the round trip for blocks of 64 elements: 4-bit codes times the largest magnitude."""
    # On a CPU it warns about a package with faster products, which are not used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Imported here: an extra.
    from bitsandbytes import functional

    def round_trip(weight_OI: Tensor) -> tuple[Tensor, int]:
        elements = weight_OI.numel()
        # One row per block: on a CPU, bitsandbytes 0.50 applies wrong scales if the row length is
        # not a multiple of the block size.
        blocks = F.pad(weight_OI.flatten(), (0, -elements % _BLOCK)).view(-1, _BLOCK)
        codes, state = functional.quantize_4bit(
            blocks, blocksize=_BLOCK, compress_statistics=False, quant_type=kind
        )
        values = functional.dequantize_4bit(codes, state).flatten()[:elements]
        size = codes.numel() + state.absmax.numel() * _FP32_BYTES
        return values.view_as(weight_OI), size

    return round_trip
