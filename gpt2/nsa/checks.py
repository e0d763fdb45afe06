"""Checks that only steps with native sparse attention have: entropy and receptive field.

The loss on random tokens stays at their entropy, unless the step has read its targets. Every query
of every branch depends on exactly the tokens of the paper's definition.

B batch, T tokens, S perturbed tokens (one in each row of a batch), N heads, K key/value heads,
H head dim, M compressed blocks, n selected blocks, V size of the random vocabulary.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.check.cases import CheckFinding
from gpt2.check.subject import StepUnderTest
from gpt2.model import GPT
from gpt2.nsa.branches import attend_branches
from gpt2.nsa.cache import BranchKeyValues
from gpt2.nsa.module import Nsa, compress_blocks
from gpt2.nsa.options import NsaOptions
from gpt2.nsa.reference import selected_blocks
from gpt2.nsa.select import random_blocks

# Few, so that the model soon learns the frequency of each.
_VOCABULARY = 8
_ROWS = 8
_STEPS = 30
_LEARNING_RATE = 1e-2
# Final steps whose losses are averaged: 8 · 40 tokens each, of exactly known entropy.
_EVAL_STEPS = 5
_SLACK_NATS = 0.02
# Change of a head's output that counts, if a value changes by 1; weights are above about e^-20.
_MIN_CHANGE = 1e-13


def check_entropy(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that the loss on fresh uniform tokens stays at ln V."""
    # One layer is enough for a leak, and the causal check covers all layers.
    small = subject.small_exact.model
    model = GPT(replace(small, shape=replace(small.shape, n_layer=1)))
    model.init_weights(subject.small_exact.seed)
    length = subject.tokens(1).shape[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    losses_T = torch.zeros(length - 1)
    for step in range(_STEPS + _EVAL_STEPS):
        idx_BT = torch.randint(_VOCABULARY, (_ROWS, length), generator=generator)
        with torch.set_grad_enabled(step < _STEPS):
            logits_BTV = model(idx_BT[:, :-1])
        losses_BT = F.cross_entropy(logits_BTV.mT, idx_BT[:, 1:], reduction="none")
        if step >= _STEPS:
            losses_T += losses_BT.detach().mean(0) / _EVAL_STEPS
        else:
            optimizer.zero_grad()
            losses_BT.mean().backward()
            optimizer.step()
    entropy, quarters = math.log(_VOCABULARY), losses_T.chunk(4)
    lowest = min(quarters, key=lambda losses: float(losses.mean()))
    if float(lowest.mean()) >= entropy - _SLACK_NATS:
        return []
    expected = f"a loss of ln {_VOCABULARY} = {entropy:.2f} nats on random tokens"
    return [
        CheckFinding("no-future-leak", expected, f"{float(lowest.mean()):.2f} after {_STEPS} steps")
    ]


def check_field(subject: StepUnderTest) -> list[CheckFinding]:
    """Check every query and token of the small size, branch by branch."""
    attention = subject.model.blocks[0].attn
    pattern = attention.pattern
    assert isinstance(pattern, Nsa)
    options = pattern.options
    length, heads = subject.tokens(1).shape[1], subject.model.config.shape.n_head
    projection = subject.small_exact.model.attention.projection
    key_heads = projection.kv_heads(attention.shape)
    generator = torch.Generator().manual_seed(0)
    q_1NTH, k_1KTH = (
        torch.randn(1, count, length, pattern.head_dim, generator=generator).double()
        for count in (heads, key_heads)
    )
    # Row 0 is the original; in row s + 1 the value of token s differs.
    v_BKTH = torch.randn(1, key_heads, length, pattern.head_dim, generator=generator).double()
    v_BKTH = v_BKTH.repeat(length + 1, 1, 1, 1)
    for s in range(length):
        v_BKTH[s + 1, :, s] += 1
    k_BKTH, q_BNTH = (x.expand(length + 1, -1, -1, -1) for x in (k_1KTH, q_1NTH))
    with torch.no_grad():
        blocks_MH = k_1KTH[:, :, :0]
        compressed: list[Tensor] = []
        if options.branch_compressed or options.ranks:
            blocks_MH = compress_blocks(k_1KTH, options, pattern.phi_k)
            compressed.append(blocks_MH.expand(length + 1, -1, -1, -1))
        if options.branch_compressed:
            compressed.append(compress_blocks(v_BKTH, options, pattern.phi_v))
        keys_values = (k_BKTH, v_BKTH)
        keys = BranchKeyValues(
            tuple(compressed) or None,
            keys_values if options.branch_selected else None,
            keys_values if options.branch_window else None,
        )
        branches = attend_branches(q_BNTH, keys, options, 0, pattern.block)
        selected_KTn = _selected_blocks(options, q_1NTH, blocks_MH, pattern.block)
    findings = []
    for name, out_BNTH in zip(options.branches, branches, strict=True):
        changes_SNT = (out_BNTH[1:] - out_BNTH[:1]).abs().amax(-1) > _MIN_CHANGE
        findings += _compare(name, options, changes_SNT, selected_KTn)
    return findings


def _compare(
    name: str, options: NsaOptions, changes_SNT: Tensor, selected_KTn: list[list[list[int]]]
) -> list[CheckFinding]:
    """Return a finding for the first query whose visible tokens differ from the definition."""
    for n in range(changes_SNT.shape[1]):
        selected_Tn = selected_KTn[n * len(selected_KTn) // changes_SNT.shape[1]]
        for t in range(changes_SNT.shape[2]):
            seen = changes_SNT[:, n, t].nonzero().flatten().tolist()
            expected = _expected_tokens(name, options, t, selected_Tn[t])
            if seen != expected:
                text = f"query {t} of head {n} sees tokens {_ranges(expected)} in its {name} branch"
                return [CheckFinding("receptive-field", text, _ranges(seen))]
    return []


def _expected_tokens(name: str, options: NsaOptions, t: int, selected: list[int]) -> list[int]:
    """Return the tokens visible to query ``t``, from the paper's definition."""
    match name:
        case "window":
            return list(range(max(0, t - options.window + 1), t + 1))
        case "selected":
            return [s for s in range(t + 1) if s // options.select in selected]
    ends = range(options.compress, t + 2, options.stride)
    return sorted({s for end in ends for s in range(end - options.compress, end)})


def _selected_blocks(
    options: NsaOptions, q_1NTH: Tensor, blocks_1KMH: Tensor, block: int
) -> list[list[list[int]]]:
    """Return the selected blocks of each key head and query, from the definition."""
    heads, (_, n_head, length, width) = blocks_1KMH.shape[1], q_1NTH.shape
    if not options.branch_selected:
        return [[[]] * length] * heads
    if not options.ranks:
        blocks_BKTn = random_blocks(options, block, heads, 0, length, q_1NTH.device)
        return [[[j for j in row if j >= 0] for row in rows] for rows in blocks_BKTn[0].tolist()]
    selected = []
    for k in range(heads):
        queries_gTH = q_1NTH[0, k * n_head // heads : (k + 1) * n_head // heads]
        scores_gTM = queries_gTH @ blocks_1KMH[0, k].mT * width**-0.5
        rows = []
        for t in range(length):
            visible = max(0, (t + 1 - options.compress) // options.stride + 1)
            weights_M = scores_gTM[:, t, :visible].softmax(-1).sum(0)
            rows.append(selected_blocks(t, weights_M.tolist(), options))
        selected.append(rows)
    return selected


def _ranges(tokens: list[int]) -> str:
    """Format tokens as ranges, such as 0-3, 8-15."""
    runs: list[list[int]] = []
    for token in tokens:
        if runs and token == runs[-1][1] + 1:
            runs[-1][1] = token
        else:
            runs.append([token, token])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs) or "none"


# As named in ``NsaOptions.own_checks``.
NSA_CHECKS = {"field": check_field, "entropy": check_entropy}
