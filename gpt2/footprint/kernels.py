"""Makes a fake step on the CPU take the kernels and the piece sizes of a target.

torch without CUDA cannot run backward on a fake CUDA tensor, so the step is fake on the CPU. Where
a GPU takes another kernel, that kernel's own fake form stands in: what it saves for backward is
what a GPU would save.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2 import loss
from gpt2.attention import base
from gpt2.attention.forms import choose_form
from gpt2.attention.joined import window
from gpt2.attention.options import AttentionConfig
from gpt2.attention.rows import plan
from gpt2.attention.rows.parts import Chunk
from gpt2.footprint.flex import flex_pass
from gpt2.footprint.tracker import Tracker
from gpt2.shape import Shape
from gpt2.training import step
from lib.machine.gpus import Gpu

# More chunks than this are walked as one large one and the last ones.
_MOST_CHUNKS = 6
# Chunks and blocks whose memory is followed: one's is still held when the next one is computed.
_FOLLOWED = 2


@contextmanager
def kernels_of(target: Gpu | None, backend: str, tracker: Tracker) -> Iterator[None]:
    """Inside, training steps use the kernels of ``target``, or the CPU's own where it is None.

    ``backend`` is the configuration's choice for plain attention.
    """
    blocks = _all_rows if target else _first_blocks(loss._blocks)
    elements = plan.GPU_CHUNK_ELEMENTS if target else plan.CPU_CHUNK_ELEMENTS
    with ExitStack() as stack:
        stack.enter_context(_replaced(loss, "_blocks", blocks))
        stack.enter_context(_replaced(plan, "CPU_CHUNK_ELEMENTS", elements))
        chunks = _few_chunks(plan.RowPlan.chunks, tracker)
        stack.enter_context(_replaced(plan.RowPlan, "chunks", chunks))
        # It reads numbers, and a fake tensor has none.
        stack.enter_context(_replaced(step, "require_finite", lambda *arguments: None))
        if target:
            stack.enter_context(_replaced(base, "choose_form", _form_on_gpu))
            stack.enter_context(_replaced(window, "_all_pairs", flex_pass(tracker)))
            attention = _Attention(target, backend)
            stack.enter_context(_replaced(F, "scaled_dot_product_attention", attention))
            stack.enter_context(_replaced(F, "dropout", _dropout))
        yield


class _Attention:
    """Plain attention as a GPU runs it, in the place of torch's own."""

    def __init__(self, target: Gpu, backend: str) -> None:
        self.target, self.backend = target, backend
        self.on_cpu = F.scaled_dot_product_attention

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As torch chooses on a GPU: flash, else memory-efficient, else plain products.

        Flash knows half precision and no mask; memory-efficient knows no shared heads.
        """
        half = q.dtype in (torch.bfloat16, torch.float16)
        flash = self.target.flash and half and attn_mask is None
        if self.backend in ("auto", "flash") and flash:
            return torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal
            )[0]
        if self.backend == "math" or enable_gqa:
            with sdpa_kernel(SDPBackend.MATH):
                return self.on_cpu(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
        bias = None
        if attn_mask is not None:
            shape = (q.shape[0], q.shape[1], *attn_mask.shape[-2:])
            bias = torch.zeros_like(attn_mask, dtype=q.dtype).expand(shape)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, dropout_p, is_causal
        )[0]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A GPU keeps a byte for each element; a CPU keeps factors in the type of the input."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0.0 else x


def _form_on_gpu(attention: AttentionConfig, shape: Shape, shows_weights: bool, device: str) -> str:
    return choose_form(attention, shape, shows_weights, "cuda")


def _all_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The loss's blocks on a GPU: all rows at once."""
    yield tensors


def _first_blocks(
    blocks: Callable[..., Iterator[tuple[Tensor, ...]]],
) -> Callable[..., Iterator[tuple[Tensor, ...]]]:
    """The loss's blocks on a CPU are alike and leave nothing behind: the first few say it all."""
    return lambda *tensors: islice(blocks(*tensors), _FOLLOWED)


def _few_chunks(
    chunks: Callable[[plan.RowPlan, Tensor], Iterator[Chunk]], tracker: Tracker
) -> Callable[[plan.RowPlan, Tensor], Iterator[Chunk]]:
    """The row engine's chunks; of very many, one in the place of all but the last, which are the
    widest. Its FLOPs count by the share of its pairs that the chunks compute."""

    def few(self: plan.RowPlan, q_BNTH: Tensor) -> Iterator[Chunk]:
        found = list(chunks(self, q_BNTH))
        if len(found) <= _MOST_CHUNKS:
            yield from found
            return
        others = found[:-_FOLLOWED]
        whole = Chunk(0, others[-1].last, 0)
        pairs = sum(chunk.height * (chunk.last - chunk.left) for chunk in others)
        with tracker.standing_for(pairs / whole.last**2):
            yield whole
        yield from found[-_FOLLOWED:]

    return few


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
