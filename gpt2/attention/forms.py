"""Which form computes attention: the row engine, joined passes, or torch's own; imports no torch."""

from gpt2.attention.options import AttentionConfig
from gpt2.shape import Shape
from lib.errors import PreflightError, Problem

# FlexAttention's kernels know no narrower head.
NARROWEST_HEAD = 16


def choose_form(attention: AttentionConfig, shape: Shape, shows_weights: bool, device: str) -> str:
    """sdpa, rows, joined, or own where the pattern attends by itself, on a ``device`` that is cpu or
    cuda.

    ``shows_weights`` says that an MLP reads attention weights. PreflightError where the configured
    backend has no form of the configured parts.
    """
    backend = attention.backend
    if attention.pattern.attends:
        if backend != "auto":
            raise _refusal(backend, [attention.pattern.name])
        return "own"
    extras = [part.name for part in (*attention.terms, *attention.gates)]
    extras += ["an MLP that reads attention weights"] if shows_weights else []
    if backend == "auto":
        # Joined passes have to be asked for: no GPU has shown yet that they are right and faster.
        return "rows" if extras else "sdpa"
    if backend in ("rows", "joined"):
        lacking = joined_lacks(attention, shape, shows_weights, device)
        missing = lacking if backend == "joined" else []
    else:
        backend, missing = "sdpa", extras
    if missing:
        raise _refusal(attention.backend, missing)
    return backend


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


def _refusal(backend: str, missing: list[str]) -> PreflightError:
    what = f"{backend} attention has no form of: {', '.join(missing)}"
    where = f"ATTENTION_BACKEND_{backend.upper()}"
    return PreflightError(Problem(what, where, "type: SET=ATTENTION_BACKEND_AUTO=y"))
