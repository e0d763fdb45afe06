"""Attention statistics: entropy of rows, and the effect of score terms and gates.

B batch, T tokens (queries), N heads, K key/value heads, H head dim; r the rows of a chunk, c its
columns.

Rows are computed in chunks by the row engine for every backend, so no B×N×T×T tensor is created and
the statistics do not depend on the backend.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gpt2.attention.chunk_parts import AttentionPlan, Gate, Inputs, RowChunk, ScoreTerm, repeat_kv
from gpt2.attention.chunked import ChunkSoftmaxes, chunk_softmaxes
from gpt2.mechanism_statistics import gate_statistics


def attention_statistics(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    plan: AttentionPlan,
    terms: Mapping[str, ScoreTerm],
    gates: Mapping[str, Gate],
) -> dict[str, Tensor]:
    """Return means over all rows of the weights p that multiply V, before dropout.

    attention/entropy   −Σ_j p_ij ln p_ij, nats
    <term>/share        Σ_j p_ij |r_ij| / (|r_ij| + |s_ij|): r the term's addition to the score s
    <term>/moved        ½ Σ_j |p_ij − p⁰_ij|: p⁰ the weights without the term
    <gate>/gate_*       see ``gate_values``
    """
    inputs = plan.by_part(plan.inputs())
    sums: dict[str, list[Tensor]] = defaultdict(list)
    statistics: dict[str, list[Tensor]] = defaultdict(list)
    with torch.autocast(q_BNTH.device.type, enabled=False):
        q_BNTH = q_BNTH * q_BNTH.shape[-1] ** -0.5
        k_BNTH = repeat_kv(k_BKTH, q_BNTH.shape[1])
        for chunk in plan.chunks(q_BNTH):
            soft = chunk_softmaxes(plan, q_BNTH, k_BNTH, chunk, inputs)
            sums["attention/entropy"].append(torch.special.entr(soft.last_BNrc).sum())
            for name, term in terms.items():
                for statistic, total in _term_sums(term, plan, q_BNTH, k_BNTH, chunk, inputs, soft):
                    sums[f"{name}/{statistic}"].append(total)
            for name, saved_BNrm in zip(gates, soft.known_BNrm, strict=True):
                statistics[name].append(saved_BNrm[..., 0])
        rows = q_BNTH.shape[:3].numel()
        means = {name: torch.stack(each).double().sum() / rows for name, each in sums.items()}
        for name, gate in gates.items():
            gate_BNT = gate.gate(torch.cat(statistics[name], 2), gate.inputs())
            means |= gate_statistics(name, gate_BNT)
    return means


def _term_sums(
    term: ScoreTerm,
    plan: AttentionPlan,
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    chunk: RowChunk,
    inputs: Inputs,
    soft: ChunkSoftmaxes,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the statistics of a term, summed over the rows of a chunk."""
    others = replace(plan, terms=[each for each in plan.terms if each is not term])
    without = chunk_softmaxes(others, q_BNTH, k_BNTH, chunk, inputs)
    weights_BNrc = soft.last_BNrc
    added_BNrc = torch.zeros_like(weights_BNrc)
    term.add_(added_BNrc, q_BNTH, k_BNTH, chunk, inputs[term])
    added_BNrc.abs_()
    # Masked pairs have a huge score and weight 0, so their share is 0.
    both_BNrc = added_BNrc + without.first.scores_BNrc.abs()
    tiny = torch.finfo(both_BNrc.dtype).tiny
    yield "share", (weights_BNrc * added_BNrc / both_BNrc.clamp_min(tiny)).sum()
    yield "moved", (weights_BNrc - without.last_BNrc).abs().sum() / 2
