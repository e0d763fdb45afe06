"""Peak memory of this process."""

import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_bytes(device: "torch.device") -> int:
    """Return the peak memory so far in bytes.

    On a GPU, the memory allocated for tensors; on a CPU, the resident set size of this process.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # Bytes on macOS, KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
