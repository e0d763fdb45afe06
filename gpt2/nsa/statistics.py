"""Training statistics of native sparse attention: health of the gates, and block selection.

B batch, T tokens (queries), N heads, K key/value heads, H head dim, J selection blocks, n selected
blocks, c built branches.
"""

import torch
from torch import Tensor

from gpt2.nsa.cache import BranchKeyValues
from gpt2.nsa.options import NsaOptions
from gpt2.nsa.select import random_blocks, rank_compressed

_SHORT_NAMES = {"compressed": "cmp", "selected": "sel", "window": "win"}
# A row counts as collapsed onto one branch below this entropy (in nats) and above this share.
LOW_ENTROPY, LARGE_SHARE = 0.1, 0.95


def gate_statistics(gates_cBNT: Tensor, branches: tuple[str, ...]) -> dict[str, Tensor]:
    """Return statistics of the gates and of the gate shares p_c = g_c / Σ g over heads and tokens.

    nsa/gate_entropy     mean of −Σ p ln p in nats, at most ln c; nsa/gate_entropy_min: the minimum
    nsa/gate_largest     mean of the largest p; nsa/gate_largest_max: the maximum
    nsa/gate_collapsed   share of rows with an entropy below 0.1 and a p above 0.95
    nsa/gate_moved       mean of |g − 1/c|, the distance from the initial value
    nsa/share_*          mean p of the compressed, the selected and the window branch
    """
    gates_cBNT = gates_cBNT.float()
    shares_cBNT = gates_cBNT / gates_cBNT.sum(0).clamp_min(torch.finfo(torch.float32).tiny)
    entropy_BNT = torch.special.entr(shares_cBNT).sum(0)
    largest_BNT = shares_cBNT.amax(0)
    collapsed_BNT = (entropy_BNT < LOW_ENTROPY) & (largest_BNT > LARGE_SHARE)
    return {
        "nsa/gate_entropy": entropy_BNT.mean(),
        "nsa/gate_entropy_min": entropy_BNT.min(),
        "nsa/gate_largest": largest_BNT.mean(),
        "nsa/gate_largest_max": largest_BNT.max(),
        "nsa/gate_collapsed": collapsed_BNT.float().mean(),
        "nsa/gate_moved": (gates_cBNT - 1 / len(branches)).abs().mean(),
        **{
            f"nsa/share_{_SHORT_NAMES[name]}": share_BNT.mean()
            for name, share_BNT in zip(branches, shares_cBNT, strict=True)
        },
    }


def selected_blocks(
    q_BNTH: Tensor, keys: BranchKeyValues, options: NsaOptions, block: int
) -> Tensor | None:
    """Return the blocks BKTn that a whole sequence selects in layer ``block``, −1 for none.

    Returns None if the selected branch is not built.
    """
    if not options.branch_selected:
        return None
    batch, _, length, width = q_BNTH.shape
    if not options.ranks:
        drawn = random_blocks(options, block, keys.heads, 0, length, q_BNTH.device)
        return drawn.expand(batch, -1, -1, -1)
    assert keys.compressed_BKMH
    with torch.autocast(q_BNTH.device.type, enabled=False):
        q_BKgTH = (q_BNTH * width**-0.5).unflatten(1, (keys.heads, -1))
        return rank_compressed(q_BKgTH, keys.compressed_BKMH[0], options)


def selection_statistics(blocks_BKTn: Tensor, options: NsaOptions) -> dict[str, Tensor]:
    """Return statistics of the selected blocks.

    The first block, the token's own block and the previous block are forced.

    nsa/blocks      mean number of blocks per token; nsa/blocks_max: the maximum
    nsa/chosen      share of blocks that were not forced
    nsa/distance    mean distance in tokens from the end of an unforced block to the query;
                    NaN, and therefore omitted from records, if no block was unforced
    nsa/overlap     mean share of a token's blocks that the previous token selects too
    """
    length = blocks_BKTn.shape[2]
    count = -(-length // options.select)
    # Column 0 collects the padding (−1).
    has_BKTJ = torch.zeros(*blocks_BKTn.shape[:3], count + 1, device=blocks_BKTn.device)
    has_BKTJ = has_BKTJ.scatter_(-1, blocks_BKTn + 1, 1.0)[..., 1:]
    tokens_T1 = torch.arange(length, device=has_BKTJ.device)[:, None]
    index_J = torch.arange(count, device=has_BKTJ.device)
    own_T1 = tokens_T1 // options.select
    forced_TJ = (index_J == 0) | (index_J == own_T1) | (index_J == own_T1 - 1)
    chosen_BKTJ = has_BKTJ * ~forced_TJ
    distance_TJ = tokens_T1 - ((index_J + 1) * options.select - 1)
    counts_BKT = has_BKTJ.sum(-1)
    shared_BKT = (has_BKTJ[:, :, 1:] * has_BKTJ[:, :, :-1]).sum(-1)
    return {
        "nsa/blocks": counts_BKT.mean(),
        "nsa/blocks_max": counts_BKT.max(),
        "nsa/chosen": chosen_BKTJ.sum() / counts_BKT.sum(),
        "nsa/distance": (chosen_BKTJ * distance_TJ).sum() / chosen_BKTJ.sum(),
        "nsa/overlap": (shared_BKT / counts_BKT[:, :, 1:]).mean(),
    }
