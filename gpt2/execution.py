"""Chunk sizes and kernels of a forward and backward pass, given to a model."""

from dataclasses import dataclass

from gpt2.attention.rows import ScoreChunks
from gpt2.attention.tiled import TileLaunch
from gpt2.loss import LogitsChunks

_SCORES, _LOGITS = ScoreChunks(), LogitsChunks()


@dataclass(frozen=True)
class Execution:
    """Execution of a model; the results of two executions differ in rounding only."""

    score_chunks: ScoreChunks = _SCORES
    logits_chunks: LogitsChunks = _LOGITS
    # Launch of the Triton kernels; None: on a GPU that supports them.
    tile_launch: TileLaunch | None = None


DEFAULT_EXECUTION = Execution()
