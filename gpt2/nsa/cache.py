"""KV cache of the three branches, and single-token decoding from the cache.

B batch, T new tokens, S tokens, N heads, K key/value heads, g query heads per key/value head,
H head dim, M compressed blocks, n selected blocks; c the keys that are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.attention.positions import PositionEncoding
from gpt2.kv_cache import BlockKVCache
from gpt2.nsa.options import NsaOptions
from gpt2.nsa.select import random_blocks, score_blocks, select_blocks

# Keys and values of a branch.
KeyValue = tuple[Tensor, Tensor]
# Suffix of the cache entries of a branch with separate keys and values.
_SUFFIXES = {"compressed": "_raw", "window": "_window"}
# Function from the tokens of each branch to the complete compressed keys and values, or keys alone.
CompressFn = Callable[[dict[str, KeyValue]], tuple[Tensor, ...] | None]


@dataclass(frozen=True)
class BranchKeyValues:
    """Keys and values of each branch, for all tokens that the queries may see.

    A field is None if its branch is not built.
    """

    # Only the keys if the compressed blocks are used for ranking alone.
    compressed_BKMH: tuple[Tensor, ...] | None
    selected_BKSH: KeyValue | None
    window_BKSH: KeyValue | None

    @property
    def heads(self) -> int:
        """Return the number of key heads K."""
        return next(k for k in vars(self).values() if k)[0].shape[1]


class RingBuffer:
    """Ring buffer of the last ``size`` tokens; token t is stored at index t mod ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.room_BKSH: Tensor | None = None

    def write(self, new_BKTH: Tensor, position: int) -> Tensor:
        """Store the tokens from ``position`` on and return all stored tokens, in no token order."""
        if self.room_BKSH is None:
            batch, heads, _, width = new_BKTH.shape
            self.room_BKSH = new_BKTH.new_empty(batch, heads, self.size, width)
        last = position + new_BKTH.shape[2]
        indices = self._places(max(position, last - self.size), last)
        self.room_BKSH.index_copy_(2, indices, new_BKTH[:, :, -len(indices) :].detach())
        return self.room_BKSH[:, :, : min(last, self.size)]

    def with_new(self, new_BKTH: Tensor, position: int, start: int) -> Tensor:
        """Return the stored tokens [start, position) followed by the new tokens, in token order."""
        if start >= position:
            return new_BKTH
        assert self.room_BKSH is not None
        earlier = self.room_BKSH.index_select(2, self._places(start, position))
        return torch.cat([earlier, new_BKTH], 2)

    def _places(self, start: int, stop: int) -> Tensor:
        device = None if self.room_BKSH is None else self.room_BKSH.device
        return torch.arange(start, stop, device=device) % self.size


class NsaCache(BlockKVCache):
    """KV cache of one NSA layer.

    The cache stores the keys and values of all tokens if blocks can be selected, the compressed
    blocks, and ring buffers. A branch with separate keys and values has its own ring buffer, of one
    compressed block or of the window. Branches with shared keys and values read the entry of the
    branch with the longest memory. With rotary positions the stored keys are rotated; if attended
    keys are compressed too, the last block is also stored unrotated.
    """

    def __init__(
        self, options: NsaOptions, block: int, positions: PositionEncoding | None = None
    ) -> None:
        """Create an empty cache for the layer with index ``block``, which seeds random selection.

        ``positions`` rotates the keys; None if keys are not rotated.
        """
        super().__init__(lambda row: 0)
        self.options, self.block, self.positions = options, block, positions
        self.rings: dict[str, RingBuffer] = {}

    def add(self, raw: dict[str, KeyValue], compressed: CompressFn) -> BranchKeyValues:
        """Store keys and values of new tokens and return the keys and values that the tokens see.

        ``raw`` maps branches to new keys and values; ``compressed`` computes the complete
        compressed blocks. For a single new token the window's keys are in no token order.
        """
        options, first = self.options, self.position
        last = first + raw[options.owner][0].shape[2]
        starts = {"selected": 0, "window": max(0, first + 1 - options.window)}
        due = options.compressed(last) > options.compressed(first)
        if due:
            starts["compressed"] = options.compressed(first) * options.stride
        others = () if options.shared_kv else options.branches
        visible: dict[str, list[Tensor]] = {}
        for source in dict.fromkeys((options.owner, *others)):
            served = options.branches if options.shared_kv else (source,)
            served_starts = {name: start for name, start in starts.items() if name in served}
            k_BKTH, v_BKTH = raw[source]
            for by_branch in (
                self._keys(source, k_BKTH, served, served_starts),
                self._tokens("v", source, v_BKTH, served, served_starts),
            ):
                for name, tokens in by_branch.items():
                    visible.setdefault(name, []).append(tokens)
        if due:
            self._compress(visible, starts["compressed"], compressed)
        pairs = {name: (kv[0], kv[1]) for name, kv in visible.items() if name != "compressed"}
        return BranchKeyValues(self._blocks(raw), pairs.get("selected"), pairs.get("window"))

    def _keys(
        self, source: str, k_BKTH: Tensor, served: Sequence[str], starts: dict[str, int]
    ) -> dict[str, Tensor]:
        """Return ``_tokens`` of the keys, rotated unless the keys are only compressed."""
        if self.positions is None or list(served) == ["compressed"]:
            return self._tokens("k", source, k_BKTH, served, starts)
        options, first = self.options, self.position
        attended = {name: start for name, start in starts.items() if name != "compressed"}
        tokens = self._tokens("k", source, self.positions(k_BKTH, first), served, attended)
        if options.compresses_attended and source == options.owner:
            ring = self.rings.setdefault("k_raw", RingBuffer(options.compress))
            complete, last = options.compressed(first), first + k_BKTH.shape[2]
            if options.compressed(last) > complete:
                tokens["compressed"] = ring.with_new(k_BKTH, first, complete * options.stride)
            self.kept["k_raw"] = ring.write(k_BKTH, first)
        return tokens

    def _tokens(
        self, x: str, source: str, new_BKTH: Tensor, served: Sequence[str], starts: dict[str, int]
    ) -> dict[str, Tensor]:
        """Store the new tokens and return, for each branch, the tokens from its start on."""
        options, first = self.options, self.position
        if "selected" in served:
            whole = self.extend(x, new_BKTH, dim=2, unit=options.select)
            return {name: whole[:, :, start:] for name, start in starts.items()}
        name = x if source == options.owner else f"{x}{_SUFFIXES[source]}"
        sizes = {"compressed": options.compress, "window": options.window}
        size = max(sizes[branch] for branch in served)
        ring = self.rings.setdefault(name, RingBuffer(size))
        tokens = {}
        # If the window is the whole ring and the last token is the only query, order is irrelevant.
        whole_ring = size == options.window and new_BKTH.shape[2] == 1
        for branch, start in starts.items():
            if not (branch == "window" and whole_ring):
                tokens[branch] = ring.with_new(new_BKTH, first, start)
        self.kept[name] = ring.write(new_BKTH, first)
        if "window" in starts and whole_ring:
            tokens["window"] = self.kept[name]
        return tokens

    def _compress(
        self, visible: dict[str, list[Tensor]], start: int, compressed: CompressFn
    ) -> None:
        """Store the newly complete compressed blocks, which begin at token ``start`` or later."""
        if self.options.branch_compressed:
            k_BKSH, v_BKSH = visible["compressed"]
            new = compressed({"compressed": (k_BKSH, v_BKSH)})
        else:
            if self.positions:
                k_BKSH = visible["compressed"][0]
            else:
                k_BKSH = visible["selected"][0][:, :, start:]
            # Only keys are compressed; the values are ignored.
            new = compressed({"selected": (k_BKSH, k_BKSH)})
        # Keys alone, if values are not compressed.
        for x, blocks_BKMH in zip("kv", new or (), strict=False):
            if x == "k" and self.positions:
                blocks_BKMH = self.positions(blocks_BKMH, start, self.options.stride)
            self.extend(f"{x}_compressed", blocks_BKMH, dim=2)

    def _blocks(self, raw: dict[str, KeyValue]) -> tuple[Tensor, ...] | None:
        """Return all compressed blocks, or only their keys if they are used for ranking alone."""
        if not self.options.compresses:
            return None
        empty = raw[self.options.owner][0][:, :, :0]
        names = "kv" if self.options.branch_compressed else "k"
        return tuple(self.kept.get(f"{x}_compressed", empty) for x in names)

    def attend(self, q_BNTH: Tensor, keys: BranchKeyValues) -> list[Tensor]:
        """Return the head outputs BNTH of every built branch, for T = 1.

        ``keys`` is the result of ``add`` for the token. No mask is needed: only visible keys are
        read, and the number of keys read is added to ``reads``.
        """
        q_BKgH = (q_BNTH[:, :, 0] * q_BNTH.shape[-1] ** -0.5).unflatten(1, (keys.heads, -1))
        outputs, weights_BKgM = [], None
        with torch.autocast(q_BNTH.device.type, enabled=False):
            if keys.compressed_BKMH:
                weights_BKgM = self._weigh("compressed", q_BKgH, keys.compressed_BKMH[0])
            if self.options.branch_compressed:
                assert keys.compressed_BKMH and weights_BKgM is not None
                v_BKMH = keys.compressed_BKMH[1]
                outputs.append(weights_BKgM.to(v_BKMH.dtype) @ v_BKMH)
            if keys.selected_BKSH:
                blocks_BKn = self._select(weights_BKgM, keys.heads, q_BNTH.device)
                chosen = (self._chosen(x, blocks_BKn) for x in "kv")
                outputs.append(self._read("selected", q_BKgH, *chosen))
            if keys.window_BKSH:
                outputs.append(self._read("window", q_BKgH, *keys.window_BKSH))
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
        """Return the tokens of the selected blocks up to the current token, BKcH.

        The block of the current token comes last.
        """
        size, token = self.options.select, self.position
        room = self.runs[x].room
        assert room is not None
        batch, heads, tokens, width = room.shape
        own = token // size
        count = min(self.options.count, own + 1)
        rows = torch.arange(batch * heads, device=room.device).view(batch, heads, 1)
        blocks = (blocks_BKn[..., :count] + rows * (tokens // size)).flatten()
        chosen = room.view(-1, size, width).index_select(0, blocks)
        return chosen.view(batch, heads, -1, width)[:, :, : token + 1 - (own + 1 - count) * size]

    def _weigh(self, branch: str, q_BKgH: Tensor, k_BKcH: Tensor) -> Tensor:
        """Return the softmax weights over all keys, BKgc in fp32 or wider, and count the reads."""
        self.reads[branch] += k_BKcH.shape[2]
        wide = torch.promote_types(q_BKgH.dtype, torch.float32)
        return (q_BKgH @ k_BKcH.mT).to(wide).softmax(-1)

    def _read(self, branch: str, q_BKgH: Tensor, k_BKcH: Tensor, v_BKcH: Tensor) -> Tensor:
        """Return attention over all keys, BKgH; 0 if there are no keys."""
        return self._weigh(branch, q_BKgH, k_BKcH).to(v_BKcH.dtype) @ v_BKcH
