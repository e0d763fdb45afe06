"""How much memory this process has taken."""

import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_bytes(device: "torch.device") -> int:
    """The most that was allocated so far: of the GPU by tensors, or by this process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # Bytes on macOS, KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
