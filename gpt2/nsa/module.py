"""Native sparse attention (Yuan et al. 2025, arXiv 2502.11089): branches, gates and statistics.

The statistics, of gates and of block selection, are collected while a run trains.

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, K key/value heads, g = N/K query
heads per key/value head, H head dim, M compressed blocks, l tokens per compressed block, J
selection blocks, n selected blocks, c built branches.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention.components import CustomAttention
from gpt2.attention.options import ProjectionOptions
from gpt2.attention.positions import PositionEncoding
from gpt2.attention.projections import QKV, ZeroInitLinear, split_heads
from gpt2.kv_cache import BlockKVCache
from gpt2.mechanism_statistics import Statistics
from gpt2.nsa.branches import FusedKernels, attend_branches
from gpt2.nsa.cache import BranchKeyValues, KeyValue, NsaCache
from gpt2.nsa.gather import RowPacking, packs_rows
from gpt2.nsa.options import NsaOptions, resolve_backend
from gpt2.nsa.select import chosen_blocks
from gpt2.shape import ModelShape
from lib.pruning.layers import NeverPruned, StackedLinear

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


class BlockCompressionMLP(nn.Module):
    """MLP W₂ gelu(W₁ (block + position)), a learned correction that is added to the block mean."""

    def __init__(self, shape: ModelShape, options: NsaOptions) -> None:
        super().__init__()
        width = options.compress * shape.head_dim
        # One flat vector, so that weight decay does not apply.
        self.position = nn.Parameter(torch.zeros(width))
        self.up = nn.Linear(width, options.hidden, bias=False)
        self.down = nn.Linear(options.hidden, shape.head_dim, bias=False)

    def forward(self, blocks_BKMlH: Tensor) -> Tensor:
        flat = blocks_BKMlH.flatten(-2) + self.position
        correction: Tensor = self.down(F.gelu(self.up(flat)))
        return correction


def compress_blocks(x_BKSH: Tensor, options: NsaOptions, phi: BlockCompressionMLP | None) -> Tensor:
    """Return the means BKMH of complete blocks [i·d, i·d + l), plus ``phi``, if any."""
    # Without a complete block, an empty slice keeps the result connected to the autograd graph.
    complete = x_BKSH.shape[2] >= options.compress
    blocks_BKMHl = (
        x_BKSH.unfold(2, options.compress, options.stride)
        if complete
        else x_BKSH[:, :, :0, :, None].expand(-1, -1, -1, -1, options.compress)
    )
    mean_BKMH = blocks_BKMHl.mean(-1)
    return mean_BKMH if phi is None else mean_BKMH + phi(blocks_BKMHl.mT)


class BranchGates(NeverPruned):
    """Gates that weight each branch per head and token, computed from the layer's input."""

    def __init__(self, shape: ModelShape, options: NsaOptions) -> None:
        super().__init__()
        self.kind = options.gate
        self.branches = len(options.branches)
        width = self.branches * shape.n_head
        self.c_gate = ZeroInitLinear(shape.n_embd, width, bias=False)
        # Both σ(bias) and the softmax over c equal biases are 1/c, so the output starts as the mean
        # of the branches.
        self.bias = nn.Parameter(torch.full((width,), -math.log(self.branches - 1)))

    def forward(self, x_BTC: Tensor) -> Tensor:
        logits_BTX = self.c_gate(x_BTC) + self.bias
        logits_cBNT = logits_BTX.unflatten(-1, (self.branches, -1)).permute(2, 0, 3, 1)
        return logits_cBNT.softmax(0) if self.kind == "softmax" else logits_cBNT.sigmoid()


class Nsa(CustomAttention):
    """Gated sum of the built branches: compressed blocks, selected blocks and a window.

    ``c_kv`` computes keys and values of the branches other than ``options.owner``, which uses the
    projection's. A key of tokens is compressed unrotated, and rotated to its block's first token.
    """

    def __init__(
        self,
        shape: ModelShape,
        options: NsaOptions,
        projection: ProjectionOptions,
        positions: PositionEncoding,
        block: int,
    ) -> None:
        super().__init__()
        self.options, self.block, self.positions = options, block, positions
        self.head_dim, branches = shape.head_dim, options.branches
        others = [] if options.shared_kv else [n for n in branches if n != options.owner]
        self.others = others
        # Keys and values of each.
        rows = [projection.expanded_numbers(shape) // 2] * (2 * len(others))
        self.c_kv = StackedLinear(shape.n_embd, rows, shape.bias) if others else None
        self.phi_k = BlockCompressionMLP(shape, options) if options.learns_phi else None
        self.phi_v = BlockCompressionMLP(shape, options) if options.learns_phi else None
        self.gates = BranchGates(shape, options) if len(branches) > 1 else None
        # Choices that replace those of the device.
        self.packs: RowPacking = packs_rows
        self.fused: FusedKernels | None = None

    def kernel(self, device: str) -> str:
        backend = resolve_backend(self.options, device)
        return f"nsa by {backend}" if backend else "nsa"

    @torch.compiler.disable
    def forward(self, x_BTC: Tensor, heads: QKV, cache: BlockKVCache | None = None) -> Tensor:
        raw = self._raw(x_BTC, heads)
        if cache is None:
            branches = self._attend(self.positions(heads.q_BNTH), self._keys(raw), 0)
        else:
            assert isinstance(cache, NsaCache)
            keys, first = cache.add(raw, self._compressed), cache.position
            q_BNTH = self.positions(heads.q_BNTH, first)
            if x_BTC.shape[1] == 1:
                branches = cache.attend(q_BNTH, keys)
            else:
                branches = self._attend(q_BNTH, keys, first)
        return branches[0] if self.gates is None else combine_branches(branches, self.gates(x_BTC))

    def statistics(
        self, x_BTC: Tensor, heads: QKV, cache: BlockKVCache | None = None
    ) -> Statistics:
        branches = self.options.branches
        values = {} if self.gates is None else gate_statistics(self.gates(x_BTC), branches)
        if not self.options.branch_selected:
            return values
        keys, q_BNTH = self._keys(self._raw(x_BTC, heads)), self.positions(heads.q_BNTH)
        with torch.autocast(q_BNTH.device.type, enabled=False):
            q_BKgTH = (q_BNTH * self.head_dim**-0.5).unflatten(1, (keys.heads, -1))
            ranking = q_BKgTH, keys.compressed_BKMH
            blocks_BKTn = chosen_blocks(*ranking, self.options, 0, self.block)
        return values | selection_statistics(blocks_BKTn, self.options)

    def _attend(self, q_BNTH: Tensor, keys: BranchKeyValues, first: int) -> list[Tensor]:
        return attend_branches(
            q_BNTH, keys, self.options, first, self.block, self.packs, self.fused
        )

    def new_cache(self) -> NsaCache:
        return NsaCache(self.options, self.block, self.positions)

    def _raw(self, x_BTC: Tensor, heads: QKV) -> dict[str, KeyValue]:
        """Return the unrotated keys and values of the new tokens, by branch."""
        raw = dict.fromkeys(self.options.branches, (heads.k_BKTH, heads.v_BKTH))
        if self.c_kv is not None:
            chunks = self.c_kv(x_BTC).chunk(2 * len(self.others), -1)
            by_head = iter([split_heads(chunk, self.head_dim) for chunk in chunks])
            raw |= {name: (self.transformed(next(by_head)), next(by_head)) for name in self.others}
        return raw

    def _keys(self, raw: dict[str, KeyValue]) -> BranchKeyValues:
        """Return the keys and values of a whole sequence, with positions applied to the keys."""
        blocks: tuple[Tensor, ...] | None = None
        if self.options.compresses:
            k_BKMH, *rest = self._compressed(raw)
            blocks = self.positions(k_BKMH, 0, self.options.stride), *rest
        attended = {name: raw[name] for name in ("selected", "window") if name in raw}
        # Branches with shared keys rotate the keys once.
        rotated = {id(k): self.positions(k) for k, _ in attended.values()}
        pairs = {name: (rotated[id(k)], v) for name, (k, v) in attended.items()}
        return BranchKeyValues(blocks, pairs.get("selected"), pairs.get("window"))

    def _compressed(self, raw: dict[str, KeyValue]) -> tuple[Tensor, ...]:
        """Return the complete compressed keys and values, or the mean keys that rank blocks."""
        if "compressed" not in raw:
            return (compress_blocks(raw["selected"][0].detach(), self.options, None),)
        k, v = raw["compressed"]
        pairs = (k, self.phi_k), (v, self.phi_v)
        return tuple(compress_blocks(x, self.options, phi) for x, phi in pairs)


def combine_branches(branches_BNTH: list[Tensor], gates_cBNT: Tensor) -> Tensor:
    """Return the gated sum Σ g_c · o_c of the branches, BNTH."""
    weighted = (g[..., None] * o for g, o in zip(gates_cBNT, branches_BNTH, strict=True))
    out_BNTH: Tensor = sum(weighted)
    return out_BNTH.to(branches_BNTH[0].dtype)
