"""Selection of the attention backend: SDPA, row engine or joined passes; does not import torch."""

from gpt2.attention.config import AttentionConfig
from gpt2.shape import ModelShape
from lib.errors import ConfigError, Problem

# Minimum head dim of FlexAttention's kernels.
MIN_FLEX_HEAD_DIM = 16


def select_backend(
    attention: AttentionConfig, shape: ModelShape, shows_weights: bool, device: str
) -> str:
    """Return the backend for attention on ``device`` ("cpu" or "cuda").

    One of sdpa, rows, joined, or own if the pattern has its own kernel. ``shows_weights`` is true
    if an MLP reads attention weights. Raises ConfigError if joined passes are configured but do not
    support the configured components.
    """
    if attention.pattern.attends:
        return "own"
    # Joined passes are opt-in: they have not been validated or timed on a GPU yet.
    if attention.backend == "joined":
        if unsupported := unsupported_by_flex(attention, shape, shows_weights, device):
            raise ConfigError(
                Problem(
                    f"ATTENTION_BACKEND: joined does not support {', '.join(unsupported)}",
                    next="type: SET=ATTENTION_BACKEND_ROWS=y",
                    code="attention.backend-unsupported",
                )
            )
        return "joined"
    plain = not (attention.terms or attention.gates or shows_weights)
    return "sdpa" if plain and attention.backend != "rows" else "rows"


def unsupported_by_flex(
    attention: AttentionConfig, shape: ModelShape, shows_weights: bool, device: str
) -> list[str]:
    """Return the configured features that joined passes do not support.

    FlexAttention has no dropout on weights, and the k largest weights of a row are not a sum of
    exponentials.
    """
    unsupported = [part.lacks_joined for part in (*attention.terms, *attention.gates)]
    unsupported += ["an MLP that reads attention weights"] if shows_weights else []
    unsupported += [f"DROPOUT={shape.dropout}"] if shape.dropout else []
    if device == "cuda" and shape.head_dim < MIN_FLEX_HEAD_DIM:
        unsupported.append(f"head dim {shape.head_dim} (minimum {MIN_FLEX_HEAD_DIM})")
    return [feature for feature in unsupported if feature]
