"""Lists of the queries that selected each block, for the kernels of a GPU.

B batch, T queries, K key/value heads, g query heads per key/value head, H head dim, n selected
blocks; X heads of all sequences.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries of a block that one program of a GPU processes.
SEGMENT = 256
# Partial results of a chunk of queries on a GPU: one for each of their blocks.
PARTIAL_BYTES = 1 << 30
# Queries of a tile, at least.
TILE_QUERIES = 1024


class ListChunk(NamedTuple):
    """Queries whose partial results are in memory at once: ``length`` queries from ``start`` on, of
    the owners ``first_owner`` to ``stop_owner`` − 1, in at most ``segments`` segments.
    """

    start: int
    length: int
    first_owner: int
    stop_owner: int
    segments: int


class BlockQueries(NamedTuple):
    """The inverse of a selection. An owner is a block of a key head with the queries of a tile of
    consecutive ones, in the order of tiles, heads and blocks; it has its queries in segments.
    """

    # Indices in the flat lists BKTn, grouped by owner, in ascending order of queries.
    entries: Tensor
    # Of each owner in ``entries``, and in the segments: owners + 1.
    starts: Tensor
    segments: Tensor
    # Owner of each segment; the number of owners for segments that do not exist.
    owners: Tensor


def query_chunks(q_BTKgH: Tensor, blocks_BKTn: Tensor, count: int) -> tuple[list[ListChunk], int]:
    """Return chunks of queries whose partial results fit in ``PARTIAL_BYTES``, and the queries of a
    tile: half a segment for a block, so that programs that run together read the same queries.
    """
    batch, heads, length, selected = blocks_BKTn.shape
    most = max(1, PARTIAL_BYTES // (selected * q_BTKgH.nbytes // length))
    rows = min(most, max(TILE_QUERIES, SEGMENT // 2 * count // selected), length)
    per_tile, height = batch * heads * count, most // rows * rows
    chunks = []
    for start in range(0, length, height):
        queries = min(height, length - start)
        tiles = -(-queries // rows)
        first = start // rows * per_tile
        segments = tiles * per_tile + batch * heads * queries * selected // SEGMENT
        chunks.append(ListChunk(start, queries, first, first + tiles * per_tile, segments))
    return chunks, rows


def queries_by_block(blocks_BKTn: Tensor, count: int, rows: int) -> BlockQueries:
    """Return the queries of all ``count`` blocks, in tiles of ``rows``; the host reads nothing."""
    flat_XTn = blocks_BKTn.flatten(0, 1)
    heads, length, _ = flat_XTn.shape
    device = flat_XTn.device
    tiles_T = torch.arange(length, device=device) // rows
    first_XT = (tiles_T * heads + torch.arange(heads, device=device)[:, None]) * count
    total = -(-length // rows) * heads * count
    # Absent blocks come last.
    owners_XTn = torch.where(flat_XTn < 0, total, flat_XTn + first_XT[..., None])
    by_owner, order = owners_XTn.int().flatten().sort(stable=True)
    bounds = torch.arange(total + 1, device=device, dtype=torch.int32)
    starts = torch.searchsorted(by_owner, bounds, out_int32=True)
    per_owner = (starts.diff() + SEGMENT - 1) // SEGMENT
    segments = F.pad(per_owner.cumsum(0, dtype=torch.int32), (1, 0))
    index = torch.arange(total + flat_XTn.numel() // SEGMENT, device=device, dtype=torch.int32)
    owners = torch.searchsorted(segments, index, right=True, out_int32=True) - 1
    return BlockQueries(order.int(), starts, segments, owners)
