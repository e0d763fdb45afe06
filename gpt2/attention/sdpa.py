"""Plain attention: one call of torch's scaled_dot_product_attention.

B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.attention.heads import Heads
from gpt2.attention.rows.parts import Pattern
from lib.errors import Problem, RunError

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# How torch says that no kernel of those allowed can run.
REFUSALS = ("No available kernel", "No viable backend")


def plain_attention(heads: Heads, pattern: Pattern, backend: str, dropout: float) -> Tensor:
    """Head outputs, BNTH. RunError where the kernel asked for cannot run here."""
    q, k, v = heads.q_BNTH, heads.k_BKTH, heads.v_BKTH
    seen = pattern.sdpa_arguments(q.shape[2], q.device)
    chosen = nullcontext() if backend == "auto" else sdpa_kernel(BACKENDS[backend])
    try:
        with chosen:
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, enable_gqa=k.shape[1] < q.shape[1], **seen
            )
    except RuntimeError as error:
        if not any(refusal in str(error) for refusal in REFUSALS):
            raise
        raise RunError(
            Problem(
                f"the kernel {backend!r} cannot run this attention on {q.device.type} "
                f"({q.dtype}, head dim {q.shape[-1]}, dropout {dropout})",
                where=f"SDPA_BACKEND_{backend.upper()}",
                next="set SDPA_BACKEND_AUTO=y, or turn off what the kernel lacks",
            )
        ) from error
