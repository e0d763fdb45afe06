"""What a query of native sparse attention sees: the tokens of the definition, none more, none fewer.

T tokens, S those that are changed, one in each row of a batch, N heads, K key/value heads, H head
dim, M compressed blocks.
"""

import torch
from torch import Tensor

from gpt2.attention.nsa.compress import compress
from gpt2.attention.nsa.drawn import drawn_blocks
from gpt2.attention.nsa.module import Keys, Nsa, attend_branches
from gpt2.attention.nsa.options import NsaOptions
from gpt2.attention.nsa.reference import selected_blocks
from gpt2.check.finding import Finding
from gpt2.check.subject import Subject

# Of a head output, where a value changes by 1. Weights are at least about e^-20.
_CHANGED = 1e-13


def check(subject: Subject) -> list[Finding]:
    """Of steps with the pattern: every query and token of the small size, branch by branch."""
    attention = subject.model.h[0].attn
    if not isinstance(attention.pattern, Nsa):
        return []
    pattern, options = attention.pattern, attention.pattern.options
    length, heads = subject.tokens(1).shape[1], subject.model.config.shape.n_head
    projection = subject.exact.model.attention.projection
    key_heads = projection.cached_numbers(attention.shape) // (2 * attention.shape.head_dim)
    generator = torch.Generator().manual_seed(0)
    q_1NTH, k_1KTH = (
        torch.randn(1, count, length, pattern.head_dim, generator=generator).double()
        for count in (heads, key_heads)
    )
    # Row 0 as it is, row s + 1 with another value of token s.
    v_BKTH = torch.randn(1, key_heads, length, pattern.head_dim, generator=generator).double()
    v_BKTH = v_BKTH.repeat(length + 1, 1, 1, 1)
    for s in range(length):
        v_BKTH[s + 1, :, s] += 1
    k_BKTH, q_BNTH = (x.expand(length + 1, -1, -1, -1) for x in (k_1KTH, q_1NTH))
    with torch.no_grad():
        blocks_MH = compress(k_1KTH, options, pattern.phi_k)
        blocks = (
            blocks_MH.expand(length + 1, -1, -1, -1),
            compress(v_BKTH, options, pattern.phi_v),
        )
        compressed = blocks if options.branch_compressed else blocks[:1] if options.ranks else None
        pair = (k_BKTH, v_BKTH)
        keys = Keys(
            compressed,
            pair if options.branch_selected else None,
            pair if options.branch_window else None,
        )
        branches = attend_branches(q_BNTH, keys, options, 0, pattern.block)
        lists = _lists(options, q_1NTH, blocks_MH, pattern.block)
    found = []
    for name, out_BNTH in zip(options.branches, branches, strict=True):
        changes_SNT = (out_BNTH[1:] - out_BNTH[:1]).abs().amax(-1) > _CHANGED
        found += _compare(name, options, changes_SNT, lists)
    return found


def _compare(
    name: str, options: NsaOptions, changes_SNT: Tensor, lists: list[list[list[int]]]
) -> list[Finding]:
    """The first query that sees others than the definition says."""
    for n in range(changes_SNT.shape[1]):
        chosen = lists[n * len(lists) // changes_SNT.shape[1]]
        for t in range(changes_SNT.shape[2]):
            seen = changes_SNT[:, n, t].nonzero().flatten().tolist()
            wanted = _tokens(name, options, t, chosen[t])
            if seen != wanted:
                what = f"query {t} of head {n} sees tokens {_short(wanted)} in its {name} branch"
                return [Finding(what, _short(seen))]
    return []


def _tokens(name: str, options: NsaOptions, t: int, chosen: list[int]) -> list[int]:
    """By the definition."""
    match name:
        case "window":
            return list(range(max(0, t - options.window + 1), t + 1))
        case "selected":
            return [s for s in range(t + 1) if s // options.select in chosen]
    ends = range(options.compress, t + 2, options.stride)
    return sorted({s for end in ends for s in range(end - options.compress, end)})


def _lists(
    options: NsaOptions, q_1NTH: Tensor, blocks_1KMH: Tensor, block: int
) -> list[list[list[int]]]:
    """Of every key head and query the selected blocks, by the definition."""
    heads, (_, n_head, length, width) = blocks_1KMH.shape[1], q_1NTH.shape
    if not options.branch_selected:
        return [[[]] * length] * heads
    if not options.ranks:
        drawn = drawn_blocks(options, block, heads, 0, length, q_1NTH.device)
        return [[[j for j in row if j >= 0] for row in rows] for rows in drawn[0].tolist()]
    found = []
    for k in range(heads):
        queries_gTH = q_1NTH[0, k * n_head // heads : (k + 1) * n_head // heads]
        scores_gTM = queries_gTH @ blocks_1KMH[0, k].mT * width**-0.5
        rows = []
        for t in range(length):
            seen = max(0, (t + 1 - options.compress) // options.stride + 1)
            weights_M = scores_gTM[:, t, :seen].softmax(-1).sum(0)
            rows.append(selected_blocks(t, weights_M.tolist(), options))
        found.append(rows)
    return found


def _short(tokens: list[int]) -> str:
    """Runs of tokens: 0-3, 8-15."""
    runs: list[list[int]] = []
    for token in tokens:
        if runs and token == runs[-1][1] + 1:
            runs[-1][1] = token
        else:
            runs.append([token, token])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs) or "none"
