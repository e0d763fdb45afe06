"""Native sparse attention (Yuan et al. 2025, arXiv 2502.11089): three branches and their gates.

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, K key/value heads, g = N/K, H head
dim, M compressed blocks, n selected ones.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpt2.attention.heads import Heads, split_heads
from gpt2.attention.nsa.compress import Phi, compress
from gpt2.attention.nsa.compressed import attend_compressed
from gpt2.attention.nsa.options import NsaOptions
from gpt2.attention.nsa.selected import attend_selected
from gpt2.attention.nsa.window import attend_window
from gpt2.attention.options import AttentionConfig
from gpt2.attention.own import OwnAttention
from gpt2.cache import BlockCache
from gpt2.shape import Shape
from gpt2.zero_linear import ZeroLinear
from lib.pruning.mask import Unprunable

# σ of it is 1/3, and a softmax of three of it too: the branches start as their mean.
THIRD = -math.log(2)


@dataclass(frozen=True)
class Keys:
    """Keys and values of the branches, of all tokens that the queries may see."""

    compressed_BKMH: tuple[Tensor, Tensor]
    selected_BKSH: tuple[Tensor, Tensor]
    window_BKSH: tuple[Tensor, Tensor]


class BranchGates(Unprunable):
    """How much of each branch a head takes, from the layer's input."""

    def __init__(self, shape: Shape, options: NsaOptions) -> None:
        super().__init__()
        self.kind = options.gate
        self.c_gate = ZeroLinear(shape.n_embd, 3 * shape.n_head, bias=False)
        self.bias = nn.Parameter(torch.full((3 * shape.n_head,), THIRD))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Of the compressed, the selected and the window branch: 3BNT."""
        logits_3BNT = (self.c_gate(x_BTC) + self.bias).unflatten(-1, (3, -1)).permute(2, 0, 3, 1)
        return logits_3BNT.softmax(0) if self.kind == "softmax" else logits_3BNT.sigmoid()


class Nsa(OwnAttention):
    """Compressed blocks, selected blocks and a window, gated and summed.

    The projection's keys and values are those of the selected branch. ``c_kv`` makes the others',
    C → 4·K·H in the order compressed k and v, window k and v.
    """

    kernel = "nsa by blocks"

    def __init__(self, shape: Shape, options: AttentionConfig) -> None:
        super().__init__()
        assert isinstance(options.pattern, NsaOptions)
        self.options = options.pattern
        self.head_dim = shape.head_dim
        width = 2 * options.projection.cached_numbers(shape)
        shared, mean = self.options.shared_kv, self.options.phi == "mean"
        self.c_kv = None if shared else nn.Linear(shape.n_embd, width, bias=shape.bias)
        self.phi_k = None if mean else Phi(shape, self.options)
        self.phi_v = None if mean else Phi(shape, self.options)
        self.gates = BranchGates(shape, self.options)

    @torch.compiler.disable
    def forward(self, x_BTC: Tensor, heads: Heads, cache: BlockCache | None = None) -> Tensor:
        """Head outputs, BNTH."""
        raw = self._raw(x_BTC, heads)
        keys = self._keys(raw) if cache is None else self._cached_keys(raw, cache)
        first = 0 if cache is None else cache.position
        branches = attend_branches(heads.q_BNTH, keys, self.options, first)
        return combine(branches, self.gates(x_BTC))

    def _raw(self, x_BTC: Tensor, heads: Heads) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the new tokens: compressed, selected, window."""
        selected = heads.k_BKTH, heads.v_BKTH
        if self.c_kv is None:
            return [selected, selected, selected]
        k_cmp, v_cmp, k_win, v_win = (
            split_heads(part, self.head_dim) for part in self.c_kv(x_BTC).chunk(4, -1)
        )
        return [(k_cmp, v_cmp), selected, (k_win, v_win)]

    def _keys(self, raw: list[tuple[Tensor, Tensor]]) -> Keys:
        (k, v), selected, window = raw
        compressed = (compress(k, self.options, self.phi_k), compress(v, self.options, self.phi_v))
        return Keys(compressed, selected, window)

    def _cached_keys(self, raw: list[tuple[Tensor, Tensor]], cache: BlockCache) -> Keys:
        """Those kept and the new ones; keeps what later tokens need.

        Of tokens that are to be compressed, those of blocks that are not complete stay.
        """
        options = self.options
        last = cache.position + raw[1][0].shape[2]
        begun = options.compressed(last) * options.stride
        before = options.compressed(cache.position) * options.stride
        found = []
        for i, (name, phi) in enumerate((("k", self.phi_k), ("v", self.phi_v))):
            selected = cache.extend(name, raw[1][i], dim=2)
            if self.c_kv is None:
                tokens, window = selected[:, :, before:], selected
            else:
                tokens = cache.extend(f"{name}_raw", raw[0][i], dim=2, reach=last - begun)
                window = cache.extend(f"{name}_window", raw[2][i], dim=2, reach=options.window - 1)
            new = compress(tokens, options, phi)
            earlier = [cache.kept[f"{name}_compressed"]] if cache.position else []
            compressed = torch.cat([*earlier, new], 2)
            cache.kept[f"{name}_compressed"] = compressed
            found.append((compressed, selected, window))
        return Keys(*zip(*found))


def attend_branches(q_BNTH: Tensor, keys: Keys, options: NsaOptions, first: int) -> list[Tensor]:
    """Head outputs BNTH of the three branches; the first query is that of token ``first``."""
    with torch.autocast(q_BNTH.device.type, enabled=False):
        heads = keys.selected_BKSH[0].shape[1]
        q_BKgTH = (q_BNTH * q_BNTH.shape[-1] ** -0.5).unflatten(1, (heads, -1))
        compressed, blocks_BKTn = attend_compressed(q_BKgTH, *keys.compressed_BKMH, options, first)
        by_token = q_BKgTH.transpose(2, 3)
        selected = attend_selected(by_token, *keys.selected_BKSH, blocks_BKTn, options.select)
        window = attend_window(q_BNTH, *keys.window_BKSH, options.window)
    return [compressed.flatten(1, 2), selected.transpose(2, 3).flatten(1, 2), window]


def combine(branches_BNTH: list[Tensor], gates_3BNT: Tensor) -> Tensor:
    """Σ g_c · o_c, BNTH."""
    weighted = (g[..., None] * o for g, o in zip(gates_3BNT, branches_BNTH, strict=True))
    out_BNTH: Tensor = sum(weighted)
    return out_BNTH.to(branches_BNTH[1].dtype)
