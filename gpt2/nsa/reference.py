"""Reference implementation of native sparse attention: the paper's definitions, query by query.

B batch, T tokens, C n_embd, N heads, K key/value heads, H head dim; i compressed blocks, c tokens
that a query sees. Blocks are ranked by overlaps counted token by token.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gpt2.attention.options import GroupedOptions
from gpt2.nsa.options import NsaOptions
from lib.runs.seeds import stream_seed

Parameters = Mapping[str, Tensor]


def attend(
    x_BTC: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    parameters: Parameters,
    nsa: NsaOptions,
    projection: GroupedOptions,
    encode: Callable[[Tensor, Sequence[int]], Tensor],
    block: int,
    queries: Sequence[int],
    transform: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the head outputs BTNH of ``queries`` from the q, k and v BNTH of each query head.

    ``encode`` returns heads at the positions of tokens, ``transform`` keys as scores use them.
    """
    q_BNTH, k_BNTH, v_BNTH = heads
    n_head, length = q_BNTH.shape[1:3]
    group = n_head // projection.n_kv_head
    keys = _keys(x_BTC, k_BNTH, v_BNTH, parameters, nsa, projection.n_kv_head)
    keys = {name: (transform(k), v) for name, (k, v) in keys.items()}
    k_blocks, v_blocks = _blocks(keys, parameters, nsa)
    sequence = range(length)
    q_BNTH = encode(q_BNTH, sequence)
    keys = {name: (encode(k, sequence), v) for name, (k, v) in keys.items()}
    # A compressed key has the position of the first token of its block.
    k_blocks = [
        encode(k_BNH[:, :, None], [i * nsa.stride])[:, :, 0] for i, k_BNH in enumerate(k_blocks)
    ]
    gates_BTNc = _gates(x_BTC, parameters, n_head, nsa)
    rows = []
    for t in queries:
        q_BNH = q_BNTH[:, :, t]
        visible = [i for i in range(len(k_blocks)) if i * nsa.stride + nsa.compress - 1 <= t]
        p_BNi, compressed_BNH = _attention(q_BNH, [k_blocks[i] for i in visible], v_blocks)
        branches = {}
        if nsa.branch_compressed:
            branches["compressed"] = compressed_BNH
        if nsa.branch_selected:
            selected = []
            for b in range(len(x_BTC)):
                for n in range(n_head):
                    head = n // group
                    p_gi = p_BNi[b, head * group : (head + 1) * group].detach()
                    chosen = selection(t, p_gi, head, nsa, block)
                    tokens = [s for s in range(t + 1) if s // nsa.select in chosen]
                    k_BNSH, v_BNSH = (x[b : b + 1, n : n + 1] for x in keys["selected"])
                    selected.append(_tokens(q_BNH[b : b + 1, n : n + 1], k_BNSH, v_BNSH, tokens))
            branches["selected"] = torch.cat(selected, 1).view_as(q_BNH)
        if nsa.branch_window:
            window = range(max(0, t - nsa.window + 1), t + 1)
            branches["window"] = _tokens(q_BNH, *keys["window"], list(window))
        branches_BNHc = torch.stack(list(branches.values()), -1)
        rows.append((branches_BNHc * gates_BTNc[:, t, :, None]).sum(-1))
    return torch.stack(rows, 1)


def random_rank(layer: int, head: int, token: int, block: int) -> int:
    """Return the 24-bit hash that ranks ``block`` for ``token`` in random selection."""
    state = stream_seed(0, f"nsa/{layer}/{head}") % 2**32
    for number in (token, block):
        state = _hash(state) ^ number
    return _hash(state) // 2**8


def _hash(x: int) -> int:
    x = (x // 2**16 ^ x) * 0x45D9F3B % 2**32
    x = (x // 2**16 ^ x) * 0x45D9F3B % 2**32
    return x // 2**16 ^ x


def selection(t: int, p_gi: Tensor, head: int, nsa: NsaOptions, layer: int) -> list[int]:
    """Return the blocks that query t selects for a key head, from the weights of its query heads."""
    if nsa.select_by == "random":
        own = t // nsa.select
        return top_blocks({j: float(random_rank(layer, head, t, j)) for j in range(own + 1)}, nsa)
    return selected_blocks(t, p_gi.sum(0).tolist(), nsa)


def selected_blocks(t: int, p_i: list[float], nsa: NsaOptions) -> list[int]:
    """Return the blocks selected by query t, given the weights of its visible compressed blocks."""
    score = dict.fromkeys(range(t // nsa.select + 1), 0.0)
    for j in score:
        for i, p in enumerate(p_i):
            compressed = set(range(i * nsa.stride, i * nsa.stride + nsa.compress))
            overlap = compressed & set(range(j * nsa.select, (j + 1) * nsa.select))
            score[j] += p * len(overlap) / nsa.stride
    return top_blocks(score, nsa)


def top_blocks(score: dict[int, float], nsa: NsaOptions) -> list[int]:
    """Return the first, the last and the previous block, and the highest-scoring other blocks."""
    own = max(score)
    forced = {0, own, max(0, own - 1)}
    others = sorted(score.keys() - forced, key=lambda j: (-score[j], j))
    return sorted(forced | set(others[: nsa.count - len(forced)]))


def _attention(q_BNH: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the weights BNi and the weighted sum of the values, 0 without keys."""
    if not keys:
        return q_BNH[..., :0], torch.zeros_like(q_BNH)
    scores = [(q_BNH * k).sum(-1) / math.sqrt(q_BNH.shape[-1]) for k in keys]
    total = sum(torch.exp(s - torch.stack(scores).amax(0)) for s in scores)
    weights = [torch.exp(s - torch.stack(scores).amax(0)) / total for s in scores]
    # Values of keys that the query does not see yet follow at the end.
    weighted = [w[..., None] * v for w, v in zip(weights, values, strict=False)]
    out_BNH: Tensor = sum(weighted, torch.zeros_like(q_BNH))
    return torch.stack(weights, -1), out_BNH


def _tokens(q_BNH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, tokens: list[int]) -> Tensor:
    scores_BNc = torch.einsum("bnh,bnch->bnc", q_BNH, k_BNTH[:, :, tokens])
    weights_BNc = torch.softmax(scores_BNc / math.sqrt(q_BNH.shape[-1]), -1)
    return torch.einsum("bnc,bnch->bnh", weights_BNc, v_BNTH[:, :, tokens])


def _blocks(
    keys: dict[str, tuple[Tensor, Tensor]], parameters: Parameters, nsa: NsaOptions
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the compressed keys and values, or the selected branch's mean keys, which rank."""
    if nsa.branch_compressed:
        k, v = keys["compressed"]
        return _compressed(k, parameters, "phi_k.", nsa), _compressed(v, parameters, "phi_v.", nsa)
    if nsa.branch_selected and nsa.select_by == "score":
        means = _compressed(keys["selected"][0].detach(), {}, "", nsa)
        return means, means
    return [], []


def _compressed(
    x_BNTH: Tensor, parameters: Parameters, prefix: str, nsa: NsaOptions
) -> list[Tensor]:
    blocks, start = [], 0
    while start + nsa.compress <= x_BNTH.shape[2]:
        block_BNlH = x_BNTH[:, :, start : start + nsa.compress]
        mean_BNH = block_BNlH.sum(2) / nsa.compress
        if f"{prefix}position" in parameters:
            flat = block_BNlH.reshape(*mean_BNH.shape[:2], -1) + parameters[f"{prefix}position"]
            hidden = torch.einsum("bnx,ux->bnu", flat, parameters[f"{prefix}up.weight"])
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
            down = torch.einsum("bnu,hu->bnh", hidden, parameters[f"{prefix}down.weight"])
            blocks.append(mean_BNH + down)
        else:
            blocks.append(mean_BNH)
        start += nsa.stride
    return blocks


def _keys(
    x_BTC: Tensor,
    k_BNTH: Tensor,
    v_BNTH: Tensor,
    parameters: Parameters,
    nsa: NsaOptions,
    n_kv_head: int,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the keys and values of each branch, repeated for every query head, BNTH."""
    built = {
        "compressed": nsa.branch_compressed,
        "selected": nsa.branch_selected,
        "window": nsa.branch_window,
    }
    names = [name for name in built if built[name]]
    keys = dict.fromkeys(names, (k_BNTH, v_BNTH))
    names.remove("selected" if nsa.branch_selected else names[0])
    n_head, width = k_BNTH.shape[1], k_BNTH.shape[-1]

    def separate(part: int) -> Tensor:
        """Return slice ``part`` of c_kv, by query head."""
        heads = []
        for n in range(n_head):
            start = (part * n_kv_head + n * n_kv_head // n_head) * width
            rows = slice(start, start + width)
            head = torch.einsum("btc,hc->bth", x_BTC, parameters["c_kv.weight"][rows])
            heads.append(
                head + parameters["c_kv.bias"][rows] if "c_kv.bias" in parameters else head
            )
        return torch.stack(heads, 1)

    if not nsa.shared_kv:
        keys |= {name: (separate(2 * i), separate(2 * i + 1)) for i, name in enumerate(names)}
    return keys


def _gates(x_BTC: Tensor, parameters: Parameters, n_head: int, nsa: NsaOptions) -> Tensor:
    count = nsa.branch_compressed + nsa.branch_selected + nsa.branch_window
    if count == 1:
        return x_BTC.new_ones(*x_BTC.shape[:2], n_head, 1)
    exps = []
    for c in range(count):
        rows = slice(c * n_head, (c + 1) * n_head)
        weight_NC, bias_N = parameters["gates.c_gate.weight"][rows], parameters["gates.bias"][rows]
        exps.append(torch.exp(torch.einsum("btc,nc->btn", x_BTC, weight_NC) + bias_N))
    exps_BTNc = torch.stack(exps, -1)
    if nsa.gate == "softmax":
        return exps_BTNc / exps_BTNc.sum(-1, keepdim=True)
    return exps_BTNc / (1 + exps_BTNc)
