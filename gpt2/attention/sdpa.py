"""Plain attention: a single call of torch's scaled_dot_product_attention (SDPA).

B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.attention.projections import QKV
from lib.errors import KablateError, Problem, RunError

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# torch's error messages if none of the allowed kernels can run.
NO_KERNEL_MESSAGES = ("No available kernel", "No viable backend")


def attend(
    heads: QKV,
    mask: Mapping[str, Any],
    backend: str,
    dropout: float,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Return head outputs, BNTH. Raises RunError if the configured kernel cannot run here."""
    width = heads.q_BNTH.shape[-1]
    if sink_N is not None:
        heads, mask = with_sink(heads, mask, sink_N)
    q, k, v = heads.q_BNTH, heads.k_BKTH, heads.v_BKTH
    with allowing(backend, q, dropout, RunError):
        context_BNTH = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, enable_gqa=k.shape[1] < q.shape[1], **mask
        )
    return context_BNTH if sink_N is None else context_BNTH[:, :, 1:, :width]


def with_sink(heads: QKV, mask: Mapping[str, Any], sink_N: Tensor) -> tuple[QKV, Mapping[str, Any]]:
    """Return heads and mask with a sink: a first token, visible to all, without a value.

    Its key has a 1 where queries, in a further element, have the logit times √H, and the other keys
    a 0. Heads are padded to a multiple of 8 elements, which the kernels of GPUs require.
    """
    q, k, v = heads.q_BNTH, heads.k_BKTH, heads.v_BKTH
    width = q.shape[-1]
    zeros = 7 - width % 8
    logits_BNT1 = (sink_N * width**0.5).to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    key_BK1H = F.pad(k.new_ones(*k.shape[:2], 1, 1), (width, zeros))
    # The query of the first token is 0; its output is not used.
    q = F.pad(torch.cat((q, logits_BNT1), -1), (0, zeros, 1, 0))
    k = torch.cat((key_BK1H, F.pad(k, (0, zeros + 1))), 2)
    v = F.pad(v, (0, zeros + 1, 1, 0))
    if "attn_mask" in mask:
        mask = {"attn_mask": F.pad(mask["attn_mask"], (1, 0, 1, 0), value=True)}
    return QKV(q, k, v), {**mask, "scale": width**-0.5}


def only_backend(backend: str) -> AbstractContextManager[None]:
    """Return a context that restricts torch to ``backend``, if it names a kernel."""
    return sdpa_kernel(BACKENDS[backend]) if backend in BACKENDS else nullcontext()


@contextmanager
def allowing(
    backend: str, q_BNTH: Tensor, dropout: float, error_type: type[KablateError]
) -> Iterator[None]:
    """Restrict torch to the configured kernel; raise ``error_type`` if that kernel cannot run."""
    try:
        with only_backend(backend):
            yield
    except RuntimeError as error:
        if not any(message in str(error) for message in NO_KERNEL_MESSAGES):
            raise
        raise error_type(
            Problem(
                f"the kernel {backend!r} cannot run this attention on {q_BNTH.device.type} "
                f"({q_BNTH.dtype}, head dim {q_BNTH.shape[-1]}, dropout {dropout})",
                where=f"ATTENTION_BACKEND_{backend.upper()}",
                next="type: SET=ATTENTION_BACKEND_ROWS=y, or disable the unsupported feature",
                code="attention.backend-unsupported",
            )
        ) from error
