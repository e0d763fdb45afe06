"""Backend of the selected branch on a device. Imports no torch."""

from gpt2.attention.nsa.options import NsaOptions
from lib.errors import PreflightError, Problem


def resolve_backend(options: NsaOptions, device: str) -> str:
    """Return the backend (blocks or gather) for the device type ``device``.

    Returns the empty string if the selected branch is not built. Raises PreflightError if the
    configured backend cannot run on the device.
    """
    if options.backend == "auto":
        return "gather" if device == "cuda" else "blocks"
    if options.backend == "gather" and device not in ("cpu", "cuda"):
        what = f"NSA_BACKEND: gather cannot run on {device!r} (expected cpu or cuda)"
        fix = "type: SET=NSA_BACKEND_BLOCKS=y"
        raise PreflightError(Problem(what, next=fix, code="gpu.unsupported"))
    return options.backend


def merges(options: NsaOptions, length: int) -> bool:
    """Return whether the gather backend merges adjacent blocks for sequences of ``length`` tokens.

    Merged blocks are gathered as one range of tokens.
    """
    if options.ranges == "adaptive":
        return length >= options.ranges_min
    return options.ranges == "merged"
