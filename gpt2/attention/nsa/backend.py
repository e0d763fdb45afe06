"""How the selected branch is computed on a device; imports no torch."""

from gpt2.attention.nsa.options import NsaOptions
from lib.errors import PreflightError, Problem


def resolve_backend(options: NsaOptions, device: str) -> str:
    """blocks or gather, on a ``device`` of this type; empty without the branch.

    PreflightError where the one that is asked for cannot run.
    """
    if options.backend == "auto":
        return "gather" if device == "cuda" else "blocks"
    if options.backend == "gather" and device not in ("cpu", "cuda"):
        what = f"NSA_BACKEND: gather cannot run on {device!r}"
        raise PreflightError(Problem(what, next="type: SET=NSA_BACKEND_BLOCKS=y"))
    return options.backend


def merges(options: NsaOptions, length: int) -> bool:
    """Whether gathering takes blocks that touch as one range, of ``length`` tokens."""
    if options.ranges == "adaptive":
        return length >= options.ranges_min
    return options.ranges == "merged"
