"""Detection of the attention kernel from the autograd graph of its output.

Autograd records the operation that produced a tensor. Reading this record is a hundred times
cheaper than a profile, which takes over a second to start and writes to the log of the run.
"""

import re

from torch import Tensor

_FUSED = re.compile(r"ScaledDotProduct(\w+?)Attention")


def kernel_that_made(context: Tensor) -> str:
    """Return flash, efficient, cudnn or math, or "unknown" if neither is in the graph.

    ``context`` is the output of scaled_dot_product_attention and must require a gradient.
    """
    kernel, nodes = "unknown", [context.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if fused := _FUSED.search(node.name()):
            return fused[1].lower()
        if "Softmax" in node.name():
            kernel = "math"
        nodes += [parent for parent, _ in node.next_functions]
    return kernel
