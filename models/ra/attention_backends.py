"""The choice of the attention backend; imports no torch.

sdpa     one call of torch's scaled_dot_product_attention (``sdpa.py``)
rows     chunks of query rows (``rows.py``), in any dtype on any device
triton   one pass of our own kernels (``triton.py``)
own      the kernel of the pattern itself

A module chooses when it is built, moved or converted; ``manifest.json`` and the first line of a run
name the choice. New tokens against a KV cache are computed by rows, or by the pattern itself.
"""

from collections.abc import Collection
from typing import Literal

from .attention_config import AttentionConfig
from .attention_options import ConfigNote
from .shape import ModelShape
from .lib_errors import ConfigError, Problem

Backend = Literal["sdpa", "rows", "triton", "own"]
# Place of the computation: a CPU, a GPU that the Triton kernels support, or a GPU without them, which
# is below MIN_TILE_CAPABILITY or computes in float64.
Place = Literal["cpu", "gpu", "gpu without kernels"]
# Maximum head dim of the Triton kernels: wider tiles exceed the registers.
MAX_TILE_HEAD_DIM = 128
# Minimum compute capability, major number, of the Triton kernels on NVIDIA's GPUs.
MIN_TILE_CAPABILITY = 8


def choose_backend(
    attention: AttentionConfig, shape: ModelShape, shows_weights: bool, place: Place
) -> Backend:
    """Return the backend of a block; ``shows_weights`` if its MLP reads attention weights.

    Raises ConfigError if Triton is configured and does not support the place or a component.
    """
    if attention.pattern.attends:
        return "own"
    if attention.backend == "triton":
        unsupported = _unsupported_by_triton(attention, shape)
        if place == "gpu without kernels":
            unsupported.append(f"GPUs below compute capability {MIN_TILE_CAPABILITY}.0, float64")
        if unsupported:
            what = f"ATTENTION_BACKEND: triton does not support {', '.join(unsupported)}"
            advice, code = "type: SET=ATTENTION_BACKEND_ROWS=y", "attention.backend-unsupported"
            raise ConfigError(Problem(what, next=advice, code=code))
        return "triton"
    if is_plain(attention, shows_weights) and attention.backend != "rows":
        return "sdpa"
    by_triton = attention.backend == "auto" and place == "gpu"
    return "triton" if by_triton and not _unsupported_by_triton(attention, shape) else "rows"


def is_plain(attention: AttentionConfig, shows_weights: bool) -> bool:
    """Return whether a block needs nothing of attention but the head outputs."""
    return not (attention.terms or attention.gates or shows_weights)


def gpu_notes(
    attention: AttentionConfig, shape: ModelShape, backends: Collection[Backend]
) -> list[ConfigNote]:
    """Return a note about blocks that compute by Triton kernels, or by rows, on a GPU."""
    if attention.backend == "auto" and "triton" in backends:
        compared = "they are compared with rows on the GPU before training"
        return [ConfigNote(f"attention by Triton kernels; {compared}")]
    if "rows" not in backends:
        return []
    # docs/gpu.md
    slow = "on an H100, a step took 3 to 6 times as long as the baseline"
    if unsupported := _unsupported_by_triton(attention, shape):
        lacking = f"the Triton kernels do not support {', '.join(unsupported)}"
        return [ConfigNote(f"attention by rows ({slow}): {lacking}")]
    return [ConfigNote(f"attention by rows ({slow}); ATTENTION_BACKEND_TRITON=y avoids them")]


def _unsupported_by_triton(attention: AttentionConfig, shape: ModelShape) -> list[str]:
    unsupported = [part.lacks_triton for part in (*attention.terms, *attention.gates)]
    # A pass has one band and one statistic.
    unsupported += ["several score terms"] * (len(attention.terms) > 1)
    unsupported += ["several gates"] * (len(attention.gates) > 1)
    if shape.head_dim > MAX_TILE_HEAD_DIM:
        unsupported.append(f"head dim {shape.head_dim} (maximum {MAX_TILE_HEAD_DIM})")
    return [feature for feature in unsupported if feature]
