"""Custom torch operators of the selected and the window branch, with fake-tensor support.

B batch, T queries, S tokens, K key/value heads, g query heads per key/value head, H head dim,
n selected blocks. Products and sums are computed in fp32 or wider for every dtype of q, k and v.
q must be divided by √H already, and the last query belongs to the last token. Each forward operator
returns the head outputs and the log₂-sum of every row.
"""

from typing import Any

import torch
from torch import Tensor, library

from gpt2.nsa import block_major, query_major
from gpt2.nsa.query_major import (
    MaskSpec,
    ScratchBuffers,
    accumulation_dtype,
    head_indices,
    head_slice,
)


@library.custom_op("kablate::selected", mutates_args=())
def selected(
    q_BKgTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Return attention to selected blocks of ``size`` tokens (−1 for none): BKgTH and BKgT."""
    context, logsums = _outputs(q_BKgTH)
    buffers = ScratchBuffers(logsums)
    for index in head_indices(k_BKSH):
        bands = block_major.query_tiles(blocks_BKTn[index], size, k_BKSH.shape[2])
        block_major.forward(
            head_slice(q_BKgTH, index, logsums.dtype).transpose(0, 1),
            head_slice(k_BKSH, index, logsums.dtype),
            head_slice(v_BKSH, index, logsums.dtype),
            bands,
            buffers,
            context[index].transpose(0, 1),
            logsums[index].transpose(0, 1),
        )
    return context, logsums


@library.custom_op("kablate::selected_backward", mutates_args=())
def selected_backward(
    dcontext_BKgTH: Tensor,
    q_BKgTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    context_BKgTH: Tensor,
    logsums_BKgT: Tensor,
    blocks_BKTn: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for ``selected``."""
    dq, dk, dv = (torch.empty_like(x) for x in (q_BKgTH, k_BKSH, v_BKSH))
    buffers, dtype = ScratchBuffers(logsums_BKgT), logsums_BKgT.dtype
    for index in head_indices(k_BKSH):
        bands = block_major.query_tiles(blocks_BKTn[index], size, k_BKSH.shape[2])
        dk[index], dv[index] = block_major.backward(
            head_slice(dcontext_BKgTH, index, dtype).transpose(0, 1),
            head_slice(q_BKgTH, index, dtype).transpose(0, 1),
            head_slice(context_BKgTH, index, dtype).transpose(0, 1),
            logsums_BKgT[index].transpose(0, 1),
            head_slice(k_BKSH, index, dtype),
            head_slice(v_BKSH, index, dtype),
            bands,
            buffers,
            dq[index].transpose(0, 1),
        )
    return dq, dk, dv


@library.custom_op("kablate::window", mutates_args=())
def window(q_BKgTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return attention to the last ``size`` tokens, including the query's own: BKgTH and BKgT."""
    context, logsums = _outputs(q_BKgTH)
    for index in head_indices(k_BKSH):
        query_major.forward(
            head_slice(q_BKgTH, index, logsums.dtype),
            head_slice(k_BKSH, index, logsums.dtype),
            head_slice(v_BKSH, index, logsums.dtype),
            _sight(q_BKgTH, k_BKSH, size),
            context[index],
            logsums[index],
        )
    return context, logsums


@library.custom_op("kablate::window_backward", mutates_args=())
def window_backward(
    dcontext_BKgTH: Tensor,
    q_BKgTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    context_BKgTH: Tensor,
    logsums_BKgT: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for ``window``."""
    dq, dk, dv = (torch.empty_like(x) for x in (q_BKgTH, k_BKSH, v_BKSH))
    dtype = logsums_BKgT.dtype
    for index in head_indices(k_BKSH):
        dk[index], dv[index] = query_major.backward(
            head_slice(dcontext_BKgTH, index, dtype),
            head_slice(q_BKgTH, index, dtype),
            head_slice(k_BKSH, index, dtype),
            head_slice(v_BKSH, index, dtype),
            head_slice(context_BKgTH, index, dtype),
            logsums_BKgT[index],
            _sight(q_BKgTH, k_BKSH, size),
            dq[index],
        )
    return dq, dk, dv


def _sight(q_BKgTH: Tensor, k_BKSH: Tensor, size: int) -> MaskSpec:
    queries, tokens = q_BKgTH.shape[3], k_BKSH.shape[2]
    return MaskSpec(queries, tokens, tokens - queries, window=size)


def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialized head outputs and log₂-sums."""
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q))


def _gradients(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *blocks, ctx.size = inputs
    ctx.save_for_backward(q, k, v, *output, *blocks)
    ctx.mark_non_differentiable(output[1])


def _register(forward: Any, backward: Any) -> None:
    def differentiate(ctx: Any, dcontext: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, *saved = ctx.saved_tensors
        gradients = backward(dcontext.to(q.dtype).contiguous(), q, *saved, ctx.size)
        # Block indices and the block size have no gradient.
        return *gradients, *(None for _ in saved[4:]), None

    forward.register_fake(_outputs)
    backward.register_fake(_gradients)
    forward.register_autograd(differentiate, setup_context=_save_for_backward)


_register(selected, selected_backward)
_register(window, window_backward)
