"""What decoding keeps of the three branches, and the attention of one token to it.

B batch, T new tokens, S tokens, N heads, K key/value heads, g query heads of one, H head dim, M
compressed blocks, n selected blocks; c the keys that are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.attention.nsa.blocks import score_blocks, select_blocks
from gpt2.attention.nsa.drawn import drawn_blocks
from gpt2.attention.nsa.options import NsaOptions
from gpt2.cache import BlockCache
from gpt2.positions.base import Positions

# Keys and values.
Pair = tuple[Tensor, Tensor]
# How the tokens of a branch that has keys of its own are called.
_ENDINGS = {"compressed": "_raw", "window": "_window"}
# From tokens, by branch, to complete blocks of keys and values, or of keys alone.
Compress = Callable[[dict[str, Pair]], tuple[Tensor, ...] | None]


@dataclass(frozen=True)
class Keys:
    """Keys and values of the branches, of all tokens that the queries may see; None without one."""

    # Where they only rank blocks, the keys alone.
    compressed_BKMH: tuple[Tensor, ...] | None
    selected_BKSH: Pair | None
    window_BKSH: Pair | None

    @property
    def heads(self) -> int:
        """Key heads K."""
        return next(k for k in vars(self).values() if k)[0].shape[1]


class Ring:
    """The last ``size`` tokens: token t stands in place t mod ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.room_BKSH: Tensor | None = None

    def write(self, new_BKTH: Tensor, position: int) -> Tensor:
        """Keep tokens ``position`` and following; all that is kept, not in the order of tokens."""
        if self.room_BKSH is None:
            batch, heads, _, width = new_BKTH.shape
            self.room_BKSH = new_BKTH.new_empty(batch, heads, self.size, width)
        last = position + new_BKTH.shape[2]
        places = self._places(max(position, last - self.size), last)
        self.room_BKSH.index_copy_(2, places, new_BKTH[:, :, -len(places) :].detach())
        return self.room_BKSH[:, :, : min(last, self.size)]

    def with_new(self, new_BKTH: Tensor, position: int, start: int) -> Tensor:
        """Tokens [start, position), which the ring still holds, and the new ones, in their order."""
        if start >= position:
            return new_BKTH
        assert self.room_BKSH is not None
        earlier = self.room_BKSH.index_select(2, self._places(start, position))
        return torch.cat([earlier, new_BKTH], 2)

    def _places(self, start: int, stop: int) -> Tensor:
        device = None if self.room_BKSH is None else self.room_BKSH.device
        return torch.arange(start, stop, device=device) % self.size


class NsaCache(BlockCache):
    """Keys and values of all tokens where they may be selected, of compressed blocks, and rings.

    A branch with keys of its own has its own ring: of a block's tokens, or of a window's. Branches
    that share them read what the one with the longest memory keeps. Where keys are rotated, that is
    kept rotated, and of keys that are to be compressed too the last block as they were made.
    """

    def __init__(self, options: NsaOptions, block: int, positions: Positions | None = None) -> None:
        """``block`` is the layer's number, on which blocks that are drawn depend; ``positions``
        rotates keys, where they are."""
        super().__init__(lambda row: 0)
        self.options, self.block, self.positions = options, block, positions
        self.rings: dict[str, Ring] = {}

    def add(self, raw: dict[str, Pair], compressed: Compress) -> Keys:
        """Keep keys and values of new tokens, by branch; ``compressed`` makes complete blocks of them.

        Of a single token the window's keys are in no order of tokens.
        """
        options, first = self.options, self.position
        last = first + raw[options.owner][0].shape[2]
        starts = {"selected": 0, "window": max(0, first + 1 - options.window)}
        due = options.compressed(last) > options.compressed(first)
        if due:
            starts["compressed"] = options.compressed(first) * options.stride
        others = () if options.shared_kv else options.branches
        seen: dict[str, list[Tensor]] = {}
        for source in dict.fromkeys((options.owner, *others)):
            served = options.branches if options.shared_kv else (source,)
            asked = {name: start for name, start in starts.items() if name in served}
            k_BKTH, v_BKTH = raw[source]
            for found in (
                self._keys(source, k_BKTH, served, asked),
                self._tokens("v", source, v_BKTH, served, asked),
            ):
                for name, tokens in found.items():
                    seen.setdefault(name, []).append(tokens)
        if due:
            self._compress(seen, starts["compressed"], compressed)
        pairs = {name: (seen[name][0], seen[name][1]) for name in seen if name != "compressed"}
        return Keys(self._blocks(raw), pairs.get("selected"), pairs.get("window"))

    def _keys(
        self, source: str, k_BKTH: Tensor, served: Sequence[str], starts: dict[str, int]
    ) -> dict[str, Tensor]:
        """``_tokens`` of keys; they are rotated, but for those of a branch that is compressed."""
        if self.positions is None or list(served) == ["compressed"]:
            return self._tokens("k", source, k_BKTH, served, starts)
        options, first = self.options, self.position
        attended = {name: start for name, start in starts.items() if name != "compressed"}
        found = self._tokens("k", source, self.positions(k_BKTH, first), served, attended)
        if options.compresses_attended and source == options.owner:
            ring = self.rings.setdefault("k_raw", Ring(options.compress))
            complete, last = options.compressed(first), first + k_BKTH.shape[2]
            if options.compressed(last) > complete:
                found["compressed"] = ring.with_new(k_BKTH, first, complete * options.stride)
            self.kept["k_raw"] = ring.write(k_BKTH, first)
        return found

    def _tokens(
        self, x: str, source: str, new_BKTH: Tensor, served: Sequence[str], starts: dict[str, int]
    ) -> dict[str, Tensor]:
        """Of each branch the tokens from its start on; keeps the new ones."""
        options, first = self.options, self.position
        if "selected" in served:
            whole = self.extend(x, new_BKTH, dim=2, unit=options.select)
            return {name: whole[:, :, start:] for name, start in starts.items()}
        name = x if source == options.owner else f"{x}{_ENDINGS[source]}"
        sizes = {"compressed": options.compress, "window": options.window}
        size = max(sizes[branch] for branch in served)
        ring = self.rings.setdefault(name, Ring(size))
        found = {}
        # A window of exactly the ring needs no order when its only query is the last token.
        whole_ring = size == options.window and new_BKTH.shape[2] == 1
        for branch, start in starts.items():
            if not (branch == "window" and whole_ring):
                found[branch] = ring.with_new(new_BKTH, first, start)
        self.kept[name] = ring.write(new_BKTH, first)
        if "window" in starts and whole_ring:
            found["window"] = self.kept[name]
        return found

    def _compress(self, seen: dict[str, list[Tensor]], start: int, compressed: Compress) -> None:
        """Keep the blocks that begin at token ``start`` and later and are complete now."""
        if self.options.branch_compressed:
            k_BKSH, v_BKSH = seen["compressed"]
            new = compressed({"compressed": (k_BKSH, v_BKSH)})
        else:
            k_BKSH = seen["compressed"][0] if self.positions else seen["selected"][0][:, :, start:]
            # Values take no part.
            new = compressed({"selected": (k_BKSH, k_BKSH)})
        for x, blocks_BKMH in zip("kv", new or ()):
            if x == "k" and self.positions:
                blocks_BKMH = self.positions(blocks_BKMH, start, self.options.stride)
            self.extend(f"{x}_compressed", blocks_BKMH, dim=2)

    def _blocks(self, raw: dict[str, Pair]) -> tuple[Tensor, ...] | None:
        """All compressed blocks; the keys alone where they only rank."""
        if not self.options.compresses:
            return None
        none = raw[self.options.owner][0][:, :, :0]
        names = "kv" if self.options.branch_compressed else "k"
        return tuple(self.kept.get(f"{x}_compressed", none) for x in names)

    def attend(self, q_BNTH: Tensor, keys: Keys) -> list[Tensor]:
        """Head outputs BNTH of the branches that are built, for T = 1.

        ``keys`` are what ``add`` gave for the token. Nothing is masked: only what the token sees is
        read, and counted in ``reads``.
        """
        q_BKgH = (q_BNTH[:, :, 0] * q_BNTH.shape[-1] ** -0.5).unflatten(1, (keys.heads, -1))
        found, weights_BKgM = [], None
        with torch.autocast(q_BNTH.device.type, enabled=False):
            if keys.compressed_BKMH:
                weights_BKgM = self._weigh("compressed", q_BKgH, keys.compressed_BKMH[0])
            if self.options.branch_compressed:
                assert keys.compressed_BKMH and weights_BKgM is not None
                v_BKMH = keys.compressed_BKMH[1]
                found.append(weights_BKgM.to(v_BKMH.dtype) @ v_BKMH)
            if keys.selected_BKSH:
                blocks_BKn = self._select(weights_BKgM, keys.heads, q_BNTH.device)
                chosen = (self._chosen(x, blocks_BKn) for x in "kv")
                found.append(self._read("selected", q_BKgH, *chosen))
            if keys.window_BKSH:
                found.append(self._read("window", q_BKgH, *keys.window_BKSH))
        return [context_BKgH.flatten(1, 2)[:, :, None] for context_BKgH in found]

    def _select(self, weights_BKgM: Tensor | None, heads: int, device: torch.device) -> Tensor:
        """BKn, by the compressed weights, or drawn."""
        options, token = self.options, self.position
        if not options.ranks:
            return drawn_blocks(options, self.block, heads, token, 1, device)[:, :, 0]
        assert weights_BKgM is not None
        count = token // options.select + 1
        scores_BKTJ = score_blocks(weights_BKgM[..., None, :], options, count)
        return select_blocks(scores_BKTJ, options, token)[:, :, 0]

    def _chosen(self, x: str, blocks_BKn: Tensor) -> Tensor:
        """Tokens of the selected blocks up to the token's own, BKcH: its own block is the last."""
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
        """The softmax over all keys given, BKgc in fp32 or wider."""
        self.reads[branch] += k_BKcH.shape[2]
        wide = torch.promote_types(q_BKgH.dtype, torch.float32)
        return (q_BKgH @ k_BKcH.mT).to(wide).softmax(-1)

    def _read(self, branch: str, q_BKgH: Tensor, k_BKcH: Tensor, v_BKcH: Tensor) -> Tensor:
        """Attention to all keys given, BKgH; 0 where there is none."""
        return self._weigh(branch, q_BKgH, k_BKcH).to(v_BKcH.dtype) @ v_BKcH
