"""Attention of a few new tokens to those that a cache keeps.

B batch, T new tokens (rows), S visible tokens (columns), N heads, K key/value heads, H width of a
key; r rows and c columns as the row engine's parts know them.

The parts are those of the row engine: the new tokens are one chunk of its rows. A part reads
positions from the chunk, so it does not notice that earlier queries are missing.
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
    """What ``attend`` gives for the new rows; ``heads`` are theirs, and are added to ``cache``.

    ``scale`` multiplies q·k. ``reach`` is how many earlier queries the terms read; as many are
    kept. ``weights_BTS`` has a column for each token that the first new row sees, and the new ones.
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
    return RowResult(context, [known[..., 0] for known in soft.known_BNrm], shown)


def _product(rows_BNrx: Tensor, shared_BKxy: Tensor) -> Tensor:
    """BNry. Heads that share a matrix are multiplied as more rows of it, so it is not copied."""
    batch, heads, height, _ = rows_BNrx.shape
    grouped = rows_BNrx.reshape(batch, shared_BKxy.shape[1], -1, rows_BNrx.shape[-1])
    return (grouped @ shared_BKxy).view(batch, heads, height, -1)
