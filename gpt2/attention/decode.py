"""Attention of a few new tokens to the tokens in a KV cache.

B batch, T new tokens (rows), S visible tokens (columns), N heads, K key/value heads, H key width; r
rows and c columns as in the row engine.

The components are those of the row engine: the new tokens are one chunk of rows. Components take
positions from the chunk, so missing earlier queries do not matter.
"""

import torch
from torch import Tensor

from gpt2.attention.heads import Heads
from gpt2.attention.rows.engine import RowResult
from gpt2.attention.rows.forward import weigh
from gpt2.attention.rows.parts import Chunk
from gpt2.attention.rows.plan import RowPlan, per_query_head
from gpt2.cache import BlockCache


def attend_cached(
    heads: Heads, plan: RowPlan, scale: float, reach: int, cache: BlockCache
) -> RowResult:
    """Return the same result as the row engine's ``attend`` for new rows, and update ``cache``.

    ``heads`` contains the new rows only. ``scale`` multiplies q·k. ``reach`` is the number of
    earlier queries that score terms read; that many queries are cached. ``weights_BTS`` has one
    column per token visible to the first new row, plus the new tokens.
    """
    first = cache.position
    last = first + heads.q_BNTH.shape[2]
    q_BNTH = heads.q_BNTH * scale
    k_BKSH = cache.extend("k", heads.k_BKTH, dim=2)
    v_BKSH = cache.extend("v", heads.v_BKTH, dim=2)
    if last - first == 1:
        cache.reads["keys"] += k_BKSH.shape[2]
    queries = cache.extend("q", q_BNTH, dim=2, reach=reach) if reach else q_BNTH
    chunk = Chunk(first, last, cache.left(first), origin=last - queries.shape[2])
    with torch.autocast(q_BNTH.device.type, enabled=False):
        wide = torch.promote_types(q_BNTH.dtype, torch.float32)
        scores = _product(q_BNTH, k_BKSH.mT).to(wide)
        keys = per_query_head(k_BKSH[:, :, chunk.origin - chunk.left :], q_BNTH.shape[1])
        inputs = plan.by_part(plan.inputs())
        for term in plan.terms:
            term.add_(scores, queries, keys, chunk, inputs[term])
        soft = weigh(plan, scores, chunk, inputs)
        context = _product(soft.last_BNrc.to(v_BKSH.dtype), v_BKSH)
        shown = plan.reader.read(soft.last_BNrc, chunk) if plan.reader else None
    return RowResult(context, [saved[..., 0] for saved in soft.known_BNrm], shown)


def _product(rows_BNrx: Tensor, shared_BKxy: Tensor) -> Tensor:
    """Return BNry; heads that share a matrix are folded into rows, so the matrix is not copied."""
    batch, heads, height, _ = rows_BNrx.shape
    grouped = rows_BNrx.reshape(batch, shared_BKxy.shape[1], -1, rows_BNrx.shape[-1])
    return (grouped @ shared_BKxy).view(batch, heads, height, -1)
