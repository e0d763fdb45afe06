"""Kernels and chunk sizes of a target, for a fake step on the CPU.

torch without CUDA cannot run backward on a fake CUDA tensor, so the step is fake on the CPU. If a
GPU uses another kernel, the fake implementation of that kernel replaces the CPU's, so that the same
tensors are saved for backward as on the GPU.
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

# Above this count, chunks are replaced by one large chunk and the last ones.
_MAX_CHUNKS = 6
# Chunks and blocks to run: the memory of one is still in use while the next is computed.
_CHUNKS_RUN = 2


@contextmanager
def kernels_of(target: Gpu | None, backend: str, tracker: Tracker) -> Iterator[None]:
    """Use the kernels of ``target`` in training steps, or the CPU's if it is None.

    ``backend`` is the configured backend of plain attention.
    """
    blocks = _all_rows if target else _first_blocks(loss._blocks)
    elements = plan.GPU_CHUNK_ELEMENTS if target else plan.CPU_CHUNK_ELEMENTS
    with ExitStack() as stack:
        stack.enter_context(_replaced(loss, "_blocks", blocks))
        stack.enter_context(_replaced(plan, "CPU_CHUNK_ELEMENTS", elements))
        chunks = _few_chunks(plan.RowPlan.chunks, tracker)
        stack.enter_context(_replaced(plan.RowPlan, "chunks", chunks))
        # require_finite reads values, and a fake tensor has none.
        stack.enter_context(_replaced(step, "require_finite", lambda *arguments: None))
        if target:
            stack.enter_context(_replaced(base, "choose_form", _form_on_gpu))
            stack.enter_context(_replaced(window, "_all_pairs", flex_pass(tracker)))
            attention = _Attention(target, backend)
            stack.enter_context(_replaced(F, "scaled_dot_product_attention", attention))
            stack.enter_context(_replaced(F, "dropout", _dropout))
        yield


class _Attention:
    """Replacement of torch's attention that selects kernels as a GPU does."""

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
        """Run flash, else memory-efficient attention, else plain products.

        Flash requires half precision and no mask; memory-efficient attention does not support GQA.
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
    """Drop elements as a GPU does.

    A GPU saves a byte per element; a CPU saves factors of the input's type.
    """
    return torch.native_dropout(x, p, True)[0] if training and p > 0.0 else x


def _form_on_gpu(attention: AttentionConfig, shape: Shape, shows_weights: bool, device: str) -> str:
    return choose_form(attention, shape, shows_weights, "cuda")


def _all_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield all rows at once, as the loss on a GPU does."""
    yield tensors


def _first_blocks(
    blocks: Callable[..., Iterator[tuple[Tensor, ...]]],
) -> Callable[..., Iterator[tuple[Tensor, ...]]]:
    """Limit the loss on a CPU to its first blocks.

    The blocks are alike and release their memory, so that a few determine the peak.
    """
    return lambda *tensors: islice(blocks(*tensors), _CHUNKS_RUN)


def _few_chunks(
    chunks: Callable[[plan.RowPlan, Tensor], Iterator[Chunk]], tracker: Tracker
) -> Callable[[plan.RowPlan, Tensor], Iterator[Chunk]]:
    """Merge all but the last chunks of the row engine if there are many.

    The last chunks are the widest. FLOPs of the merged chunk count by the share of its pairs that
    the original chunks compute.
    """

    def few(self: plan.RowPlan, q_BNTH: Tensor) -> Iterator[Chunk]:
        all_chunks = list(chunks(self, q_BNTH))
        if len(all_chunks) <= _MAX_CHUNKS:
            yield from all_chunks
            return
        merged = all_chunks[:-_CHUNKS_RUN]
        whole = Chunk(0, merged[-1].last, 0)
        pairs = sum(chunk.height * (chunk.last - chunk.left) for chunk in merged)
        with tracker.standing_for(pairs / whole.last**2):
            yield whole
        yield from all_chunks[-_CHUNKS_RUN:]

    return few


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
