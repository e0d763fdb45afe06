"""The selected and the window branch as torch operations, with a form for fake tensors.

B batch, T queries, S tokens, K key/value heads, g query heads of one, H head dim, n selected blocks.
Products and sums are in fp32 or wider, whatever the type of q, k and v. q is divided by √H, and the
last query is that of the last token. Each gives head outputs and the log₂-sum of every row.
"""

from typing import Any

import torch
from torch import Tensor, library

from gpt2.attention.nsa import by_blocks, by_rows
from gpt2.attention.nsa.buffers import Buffers, heads_of, wide
from gpt2.attention.nsa.by_rows import Sight


@library.custom_op("kablate::selected", mutates_args=())
def selected(
    q_BKgTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, blocks_BKTn: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """BKgTH and BKgT. Blocks are of ``size`` tokens, −1 for none."""
    context, logsums = _outputs(q_BKgTH)
    buffers = Buffers(logsums)
    for at in heads_of(k_BKSH):
        q_TgH, context_TgH, logsums_Tg = (
            x[at].transpose(0, 1) for x in (q_BKgTH, context, logsums)
        )
        given = (x.to(logsums.dtype) for x in (q_TgH, k_BKSH[at], v_BKSH[at]))
        bands = by_blocks.bands_of(blocks_BKTn[at], size, k_BKSH.shape[2])
        by_blocks.forward(*given, bands, buffers, context_TgH, logsums_Tg)
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
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.empty_like(x) for x in (q_BKgTH, k_BKSH, v_BKSH))
    buffers = Buffers(logsums_BKgT)
    for at in heads_of(k_BKSH):
        by_token = [
            x[at].transpose(0, 1).to(logsums_BKgT.dtype)
            for x in (dcontext_BKgTH, q_BKgTH, context_BKgTH, logsums_BKgT)
        ]
        keys = [x[at].to(logsums_BKgT.dtype) for x in (k_BKSH, v_BKSH)]
        bands = by_blocks.bands_of(blocks_BKTn[at], size, k_BKSH.shape[2])
        dk[at], dv[at] = by_blocks.backward(
            *by_token, *keys, bands, buffers, dq[at].transpose(0, 1)
        )
    return dq, dk, dv


@library.custom_op("kablate::window", mutates_args=())
def window(q_BKgTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """BKgTH and BKgT. A query sees the last ``size`` tokens, its own included."""
    context, logsums = _outputs(q_BKgTH)
    for at in heads_of(k_BKSH):
        given = (x[at].to(logsums.dtype) for x in (q_BKgTH, k_BKSH, v_BKSH))
        sight = _sight(q_BKgTH, k_BKSH, size)
        by_rows.forward(*given, sight, context[at], logsums[at])
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
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.empty_like(x) for x in (q_BKgTH, k_BKSH, v_BKSH))
    for at in heads_of(k_BKSH):
        every = (dcontext_BKgTH, q_BKgTH, k_BKSH, v_BKSH, context_BKgTH, logsums_BKgT)
        given = (x[at].to(logsums_BKgT.dtype) for x in every)
        dk[at], dv[at] = by_rows.backward(*given, _sight(q_BKgTH, k_BKSH, size), dq[at])
    return dq, dk, dv


def _sight(q_BKgTH: Tensor, k_BKSH: Tensor, size: int) -> Sight:
    queries, tokens = q_BKgTH.shape[3], k_BKSH.shape[2]
    return Sight(queries, tokens, tokens - queries, window=size)


def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Head outputs and log₂-sums, of any content."""
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide(q))


def _gradients(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *blocks, ctx.size = inputs
    ctx.save_for_backward(q, k, v, *output, *blocks)
    ctx.mark_non_differentiable(output[1])


def _register(forward: Any, backward: Any) -> None:
    def differentiate(ctx: Any, dcontext: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, *saved = ctx.saved_tensors
        gradients = backward(dcontext.to(q.dtype).contiguous(), q, *saved, ctx.size)
        # Blocks and their size have none.
        return *gradients, *(None for _ in saved[4:]), None

    forward.register_fake(_outputs)
    backward.register_fake(_gradients)
    forward.register_autograd(differentiate, setup_context=_keep)


_register(selected, selected_backward)
_register(window, window_backward)
