"""KV cache of the three branches, and single-token decoding from the cache.

B batch, T new tokens, S tokens, N heads, K key/value heads, g query heads per key/value head,
H head dim, M compressed blocks, n selected blocks; c the keys that are read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.attention.positions import PositionEncoding
from gpt2.kv_cache import BlockKVCache
from gpt2.nsa.options import NsaOptions
from gpt2.nsa.select import random_blocks, score_blocks, select_blocks

# Keys and values of a branch.
KeyValue = tuple[Tensor, Tensor]
# Function from the tokens of a branch to the complete compressed keys and values, or keys alone.
CompressFn = Callable[[dict[str, KeyValue]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class BranchKeyValues:
    """Keys and values of each branch that queries may see; None if the branch is not built."""

    # Only the keys if the compressed blocks are used for ranking alone.
    compressed_BKMH: tuple[Tensor, ...] | None
    selected_BKSH: KeyValue | None
    window_BKSH: KeyValue | None

    @property
    def heads(self) -> int:
        """Return the number of key heads K."""
        return next(k for k in vars(self).values() if k)[0].shape[1]


class NsaCache(BlockKVCache):
    """KV cache of one NSA layer.

    The cache stores the keys and values of all tokens if blocks can be selected, those of the
    window, the compressed blocks, and the tokens of the next one, unrotated. If branches share keys
    and values, the window is a part of the selected branch's tokens. Other stored keys are rotated.
    """

    def __init__(
        self, options: NsaOptions, block: int, positions: PositionEncoding | None = None
    ) -> None:
        """Create a cache; ``block`` is the layer index, ``positions`` rotates the keys."""
        super().__init__(lambda row: 0)
        self.options, self.block = options, block
        self.positions = positions or PositionEncoding()

    def add(self, raw: dict[str, KeyValue], compressed: CompressFn) -> BranchKeyValues:
        """Store keys and values of new tokens, by branch, and return those that the tokens see.

        ``compressed`` computes complete compressed blocks.
        """
        options, first = self.options, self.position
        blocks = self._compress(raw, compressed) if options.compresses else None
        pairs: dict[str, KeyValue] = {}
        for name, reach in (("selected", None), ("window", options.window - 1)):
            if name not in raw:
                continue
            if options.shared_kv and pairs:
                start = max(0, first + 1 - options.window)
                k, v = (x[:, :, start:] for x in pairs["selected"])
            else:
                k, v = (
                    self.extend(f"{x}_{name}", new, dim=2, reach=reach, unit=options.select or 1)
                    for x, new in (("k", self.positions(raw[name][0], first)), ("v", raw[name][1]))
                )
            pairs[name] = k, v
        return BranchKeyValues(blocks, pairs.get("selected"), pairs.get("window"))

    def _compress(self, raw: dict[str, KeyValue], compressed: CompressFn) -> tuple[Tensor, ...]:
        """Store the newly complete compressed blocks; return all of them, or the keys that rank."""
        options, first = self.options, self.position
        source = "compressed" if options.branch_compressed else "selected"
        k_BKTH, v_BKTH = raw[source]
        last, complete = first + k_BKTH.shape[2], options.compressed(first)
        names = "kv" if options.branch_compressed else "k"
        tokens = [
            self.extend(f"{x}_raw", new, dim=2, reach=options.compress - 1)
            for x, new in zip(names, (k_BKTH, v_BKTH), strict=False)
        ]
        if options.compressed(last) > complete:
            begin = complete * options.stride
            k_BKSH, *values = (x[:, :, begin - last + x.shape[2] :] for x in tokens)
            # Ranking needs no values.
            k_BKMH, *rest = compressed({source: (k_BKSH, values[0] if values else k_BKSH)})
            blocks = self.positions(k_BKMH, begin, options.stride), *rest
            for x, blocks_BKMH in zip(names, blocks, strict=True):
                self.extend(f"{x}_compressed", blocks_BKMH, dim=2)
        return tuple(self.kept.get(f"{x}_compressed", k_BKTH[:, :, :0]) for x in names)

    def attend(self, q_BNTH: Tensor, keys: BranchKeyValues) -> list[Tensor]:
        """Return the head outputs BNTH of every built branch for one token, which was added."""
        q_BKgH = (q_BNTH[:, :, 0] * q_BNTH.shape[-1] ** -0.5).unflatten(1, (keys.heads, -1))
        outputs, weights_BKgM = [], None
        with torch.autocast(q_BNTH.device.type, enabled=False):
            if keys.compressed_BKMH:
                weights_BKgM = self._weigh(q_BKgH, keys.compressed_BKMH[0])
            if self.options.branch_compressed:
                assert keys.compressed_BKMH and weights_BKgM is not None
                v_BKMH = keys.compressed_BKMH[1]
                outputs.append(weights_BKgM.to(v_BKMH.dtype) @ v_BKMH)
            if keys.selected_BKSH:
                blocks_BKn = self._select(weights_BKgM, keys.heads, q_BNTH.device)
                chosen = (self._chosen(x, blocks_BKn) for x in "kv")
                outputs.append(self._read(q_BKgH, *chosen))
            if keys.window_BKSH:
                outputs.append(self._read(q_BKgH, *keys.window_BKSH))
        return [context_BKgH.flatten(1, 2)[:, :, None] for context_BKgH in outputs]

    def _select(self, weights_BKgM: Tensor | None, heads: int, device: torch.device) -> Tensor:
        """Return the selected blocks BKn, ranked by the compressed weights or drawn at random."""
        options, token = self.options, self.position
        if not options.ranks:
            return random_blocks(options, self.block, heads, token, 1, device)[:, :, 0]
        assert weights_BKgM is not None
        count = token // options.select + 1
        scores_BKTJ = score_blocks(weights_BKgM[..., None, :], options, count)
        return select_blocks(scores_BKTJ, options, token)[:, :, 0]

    def _chosen(self, x: str, blocks_BKn: Tensor) -> Tensor:
        """Return the tokens of the selected blocks up to the current token, which is the last."""
        size, token = self.options.select, self.position
        room = self.runs[f"{x}_selected"].room
        assert room is not None
        batch, heads, tokens, width = room.shape
        own = token // size
        count = min(self.options.count, own + 1)
        rows = torch.arange(batch * heads, device=room.device).view(batch, heads, 1)
        blocks = (blocks_BKn[..., :count] + rows * (tokens // size)).flatten()
        chosen = room.view(-1, size, width).index_select(0, blocks)
        return chosen.view(batch, heads, -1, width)[:, :, : token + 1 - (own + 1 - count) * size]

    def _weigh(self, q_BKgH: Tensor, k_BKcH: Tensor) -> Tensor:
        """Return the softmax weights over all keys, BKgc in fp32 or wider."""
        wide = torch.promote_types(q_BKgH.dtype, torch.float32)
        return (q_BKgH @ k_BKcH.mT).to(wide).softmax(-1)

    def _read(self, q_BKgH: Tensor, k_BKcH: Tensor, v_BKcH: Tensor) -> Tensor:
        """Return attention over all keys, BKgH; 0 if there are no keys."""
        return self._weigh(q_BKgH, k_BKcH).to(v_BKcH.dtype) @ v_BKcH
