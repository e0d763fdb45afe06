"""Which form computes attention: the row engine, joined passes, or torch's own; imports no torch."""

from gpt2.attention.options import AttentionConfig
from gpt2.shape import Shape
from lib.errors import ConfigError, Problem

# FlexAttention's kernels know no narrower head.
NARROWEST_HEAD = 16


def choose_form(attention: AttentionConfig, shape: Shape, shows_weights: bool, device: str) -> str:
    """sdpa, rows, joined, or own where the pattern attends by itself, on a ``device`` that is cpu or
    cuda.

    ``shows_weights`` says that an MLP reads attention weights. ConfigError where joined passes are
    asked for and have no form of the configured parts.
    """
    if attention.pattern.attends:
        return "own"
    # Joined passes have to be asked for: no GPU has shown yet that they are right and faster.
    if attention.backend == "joined":
        if lacking := joined_lacks(attention, shape, shows_weights, device):
            what = f"joined attention has no form of: {', '.join(lacking)}"
            raise ConfigError(
                Problem(f"ATTENTION_BACKEND: {what}", next="type: SET=ATTENTION_BACKEND_ROWS=y")
            )
        return "joined"
    plain = not (attention.terms or attention.gates or shows_weights)
    return "sdpa" if plain and attention.backend != "rows" else "rows"


def joined_lacks(
    attention: AttentionConfig, shape: Shape, shows_weights: bool, device: str
) -> list[str]:
    """What of this attention joined passes do not compute.

    FlexAttention drops no weights, and a row's largest weights are no sum of exponentials.
    """
    lacking = [part.lacks_joined for part in (*attention.terms, *attention.gates)]
    lacking += ["an MLP that reads attention weights"] if shows_weights else []
    lacking += [f"DROPOUT={shape.dropout}"] if shape.dropout else []
    if device == "cuda" and shape.head_dim < NARROWEST_HEAD:
        lacking.append(f"heads of {shape.head_dim} numbers, fewer than {NARROWEST_HEAD}")
    return [what for what in lacking if what]
