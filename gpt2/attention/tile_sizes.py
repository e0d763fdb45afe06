"""Sides of a tile, warps and stages of loads of the Triton kernels of attention, by GPU and heads.

Importing the module requires triton.
"""

import torch
import triton

from gpt2.attention.triton_kernels import KERNELS

# Smallest side of a matrix product.
_MIN_SIDE = 16
# Bytes of a vector above which a program has more warps.
_VECTOR_BYTES = 128
# Rows and columns of a tile, warps and stages, of heads of up to 64 elements in half precision. More would
# not have enough registers, or with more stages, not enough shared memory on GPUs of compute
# capability 8.6 to 8.9 (tests compile them).
TILES = {
    "forward": (64, 16, 4, 2),
    "row_gradients": (128, 16, 8, 2),
    "column_gradients": (16, 32, 4, 2),
    "mean_weights": (64, 32, 4, 2),
}
# On compute capability 9.0, where products take operands from shared memory (docs/gpu.md: times).
HOPPER_TILES = TILES | {
    "forward": (64, 32, 4, 3),
    "row_gradients": (64, 32, 4, 3),
    "column_gradients": (32, 64, 4, 2),
}


def launch_constants(
    name: str, dtype: torch.dtype, width: int, top: int, slopes: bool = False
) -> dict[str, int]:
    """Return the sides of a tile, the warps and the stages of loads of a kernel's launch.

    ``slopes``: whether a statistic, or the mean of the weights, has a gradient.
    """
    padded = max(_MIN_SIDE, triton.next_power_of_2(width))
    is_wide = padded * dtype.itemsize > _VECTOR_BYTES
    is_hopper = kernel_target() == ("cuda", 90)
    tiles = HOPPER_TILES if is_hopper and not is_wide else TILES
    rows, columns, warps, stages = tiles[name]
    if name == "column_gradients" and slopes:
        # Slopes take the registers of the other rows.
        rows = _MIN_SIDE
    if is_wide:
        rows, warps = min(rows, 64), 8
    if padded * dtype.itemsize > 2 * _VECTOR_BYTES:
        rows, stages = min(rows, 32), 1
    # Before 3.8, triton cannot compile a narrower list of the largest scores for RDNA 3.
    listed = max(_MIN_SIDE if torch.version.hip else 1, triton.next_power_of_2(top))
    constants = {"P": padded, "M": rows, "C": columns, "L": listed}
    names = KERNELS[name].arg_names
    sides = {key: side for key, side in constants.items() if key in names}
    return sides | {"num_warps": warps, "num_stages": stages}


def kernel_target() -> tuple[str, int | str]:
    """Return the backend (cuda, hip; empty: Triton's interpreter) and the architecture of kernels."""
    if triton.knobs.runtime.interpret:
        return "", 0
    target = triton.runtime.driver.active.get_current_target()
    return target.backend, target.arch
