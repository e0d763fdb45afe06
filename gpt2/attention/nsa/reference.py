"""Native sparse attention by its definitions, query by query.

B batch, T tokens, C n_embd, N heads, K key/value heads, H head dim; i compressed blocks, c tokens
that a query sees. Blocks are ranked by overlaps counted token by token.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.attention.nsa.options import NsaOptions
from gpt2.attention.options import AttentionConfig

Parameters = Mapping[str, Tensor]


def attend(
    x_BTC: Tensor,
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    v_BNTH: Tensor,
    parameters: Parameters,
    options: AttentionConfig,
) -> Tensor:
    """Head outputs BTNH; keys and values are repeated for the heads that share them."""
    nsa = options.pattern
    assert isinstance(nsa, NsaOptions)
    n_head, length = q_BNTH.shape[1:3]
    group = n_head // options.projection.n_kv_head
    own = _own_keys(x_BTC, parameters, n_head, options)
    k_cmp, v_cmp, k_win, v_win = own or (k_BNTH, v_BNTH, k_BNTH, v_BNTH)
    k_blocks = _compressed(k_cmp, parameters, "phi_k.", nsa)
    v_blocks = _compressed(v_cmp, parameters, "phi_v.", nsa)
    gates_BTN3 = _gates(x_BTC, parameters, n_head, nsa)
    rows = []
    for t in range(length):
        q_BNH = q_BNTH[:, :, t]
        seen = [i for i in range(len(k_blocks)) if i * nsa.stride + nsa.compress - 1 <= t]
        p_BNi, compressed_BNH = _attention(q_BNH, [k_blocks[i] for i in seen], v_blocks)
        window = range(max(0, t - nsa.window + 1), t + 1)
        window_BNH = _tokens(q_BNH, k_win, v_win, list(window))
        selected = []
        for b in range(len(x_BTC)):
            for n in range(n_head):
                heads = range(n // group * group, (n // group + 1) * group)
                p_i = p_BNi[b, heads.start : heads.stop].detach().sum(0).tolist()
                tokens = _selected_tokens(t, p_i, nsa)
                at = (slice(b, b + 1), slice(n, n + 1))
                selected.append(_tokens(q_BNH[at], k_BNTH[at], v_BNTH[at], tokens))
        selected_BNH = torch.cat(selected, 1).view_as(window_BNH)
        branches_BNH3 = torch.stack([compressed_BNH, selected_BNH, window_BNH], -1)
        rows.append((branches_BNH3 * gates_BTN3[:, t, :, None]).sum(-1))
    return torch.stack(rows, 1)


def selected_blocks(t: int, p_i: list[float], nsa: NsaOptions) -> list[int]:
    """The blocks of query t, given the weights of the compressed blocks it sees."""
    own = t // nsa.select
    forced = {0, own, max(0, own - 1)}
    score = {j: 0.0 for j in range(own + 1)}
    for j in score:
        for i, p in enumerate(p_i):
            mine = set(range(i * nsa.stride, i * nsa.stride + nsa.compress))
            both = mine & set(range(j * nsa.select, (j + 1) * nsa.select))
            score[j] += p * len(both) / nsa.stride
    others = sorted(score.keys() - forced, key=lambda j: (-score[j], j))
    return sorted(forced | set(others[: nsa.count - len(forced)]))


def _selected_tokens(t: int, p_i: list[float], nsa: NsaOptions) -> list[int]:
    return [s for s in range(t + 1) if s // nsa.select in selected_blocks(t, p_i, nsa)]


def _attention(q_BNH: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Weights BNi and their sum of the values; no weights and 0 where there are no keys."""
    if not keys:
        return q_BNH[..., :0], torch.zeros_like(q_BNH)
    scores = [(q_BNH * k).sum(-1) / math.sqrt(q_BNH.shape[-1]) for k in keys]
    total = sum(torch.exp(s - torch.stack(scores).amax(0)) for s in scores)
    weights = [torch.exp(s - torch.stack(scores).amax(0)) / total for s in scores]
    out_BNH = sum(w[..., None] * v for w, v in zip(weights, values))
    return torch.stack(weights, -1), out_BNH


def _tokens(q_BNH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, tokens: list[int]) -> Tensor:
    scores_BNc = torch.einsum("bnh,bnch->bnc", q_BNH, k_BNTH[:, :, tokens])
    weights_BNc = torch.softmax(scores_BNc / math.sqrt(q_BNH.shape[-1]), -1)
    return torch.einsum("bnc,bnch->bnh", weights_BNc, v_BNTH[:, :, tokens])


def _compressed(
    x_BNTH: Tensor, parameters: Parameters, prefix: str, nsa: NsaOptions
) -> list[Tensor]:
    """Each complete block, BNH."""
    found, start = [], 0
    while start + nsa.compress <= x_BNTH.shape[2]:
        block_BNlH = x_BNTH[:, :, start : start + nsa.compress]
        one_BNH = block_BNlH.sum(2) / nsa.compress
        if nsa.phi == "mlp":
            flat = block_BNlH.reshape(*one_BNH.shape[:2], -1) + parameters[f"{prefix}position"]
            hidden = torch.einsum("bnx,ux->bnu", flat, parameters[f"{prefix}up.weight"])
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
            one_BNH = one_BNH + torch.einsum(
                "bnu,hu->bnh", hidden, parameters[f"{prefix}down.weight"]
            )
        found.append(one_BNH)
        start += nsa.stride
    return found


def _own_keys(
    x_BTC: Tensor, parameters: Parameters, n_head: int, options: AttentionConfig
) -> tuple[Tensor, ...] | None:
    """Compressed k and v, window k and v, for every query head BNTH; None where they are shared."""
    if "c_kv.weight" not in parameters:
        return None
    weight, key_heads = parameters["c_kv.weight"], options.projection.n_kv_head
    width = x_BTC.shape[-1] // n_head
    found = []
    for part in range(4):
        heads = []
        for n in range(n_head):
            start = (part * key_heads + n * key_heads // n_head) * width
            head = torch.einsum("btc,hc->bth", x_BTC, weight[start : start + width])
            if "c_kv.bias" in parameters:
                head = head + parameters["c_kv.bias"][start : start + width]
            heads.append(head)
        found.append(torch.stack(heads, 1))
    return tuple(found)


def _gates(x_BTC: Tensor, parameters: Parameters, n_head: int, nsa: NsaOptions) -> Tensor:
    """BTN3."""
    parts = []
    for c in range(3):
        rows = slice(c * n_head, (c + 1) * n_head)
        weight_NC, bias_N = parameters["gates.c_gate.weight"][rows], parameters["gates.bias"][rows]
        parts.append(torch.exp(torch.einsum("btc,nc->btn", x_BTC, weight_NC) + bias_N))
    exps_BTN3 = torch.stack(parts, -1)
    if nsa.gate == "softmax":
        return exps_BTN3 / exps_BTN3.sum(-1, keepdim=True)
    return exps_BTN3 / (1 + exps_BTN3)
