"""Plain attention: a single call of torch's scaled_dot_product_attention (SDPA).

B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention_projections import QKV
from .lib_errors import KablateError, Problem, RunError

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# torch's error messages if none of the allowed kernels can run.
NO_KERNEL_MESSAGES = ("No available kernel", "No viable backend")


def attend(heads: QKV, mask: Mapping[str, Any], backend: str, dropout: float) -> Tensor:
    """Return head outputs, BNTH. Raises RunError if the configured kernel cannot run here."""
    q, k, v = heads.q_BNTH, heads.k_BKTH, heads.v_BKTH
    with allowing(backend, q, dropout, RunError):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, enable_gqa=k.shape[1] < q.shape[1], **mask
        )


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
