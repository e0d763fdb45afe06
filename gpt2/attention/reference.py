"""Reference attention, computed row by row from the references of its components.

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, H head dim, R latent dim; c the
columns visible to a row. It shares no code with the trained model and is differentiable in any
float dtype. The formulas of score terms and gates are in the files of their modules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt2.attention.config import AttentionConfig
from gpt2.attention.cross_token import reference_factor
from gpt2.attention.options import (
    AttentionWeightsOptions,
    DenseOptions,
    FullOptions,
    GroupedOptions,
    LatentOptions,
    LearnedOptions,
    QkNormOptions,
    RaCrossTokenOptions,
    ReciprocalOptions,
    RopeOptions,
    SlidingOptions,
)
from gpt2.attention.qk_norm import reference_norm
from gpt2.attention.reciprocal import reference_scores
from gpt2.nsa import reference as nsa
from gpt2.nsa.options import NsaOptions


def unrotated(x_BNTH: Tensor, tokens: Sequence[int], options: LearnedOptions) -> Tensor:
    """Return ``x``: learned positions are added to the input of the first block."""
    return x_BNTH


def rope_rotate(x_BNTH: Tensor, tokens: Sequence[int], options: RopeOptions) -> Tensor:
    """Return ``x`` with (x_j, x_{j+H/2}) as a complex number times e^{i t θ_j} at token t."""
    half = x_BNTH.shape[-1] // 2
    angles = [[t / options.base ** (j / half) for j in range(half)] for t in tokens]
    angles_Tj = torch.tensor(angles, dtype=torch.float64).view(len(tokens), half)
    turns_Tj = torch.polar(torch.ones_like(angles_Tj), angles_Tj)
    plane_BNTj = torch.complex(x_BNTH[..., :half], x_BNTH[..., half:]) * turns_Tj
    return torch.cat((plane_BNTj.real, plane_BNTj.imag), -1).to(x_BNTH.dtype)


def dense_heads(
    x_BTC: Tensor,
    parameters: Mapping[str, Tensor],
    n_head: int,
    options: DenseOptions | GroupedOptions,
    shift_BTR: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, BNTH: a head is H columns of ``weight``, a group has one key and value."""
    weight, bias = parameters["weight"], parameters.get("bias")
    width = x_BTC.shape[-1] // n_head
    n_kv = options.n_kv_head if isinstance(options, GroupedOptions) else n_head

    def head(index: int) -> Tensor:
        rows = slice(index * width, (index + 1) * width)
        out = torch.einsum("btc,hc->bth", x_BTC, weight[rows])
        return out if bias is None else out + bias[rows]

    q = torch.stack([head(n) for n in range(n_head)], 1)
    k = torch.stack([head(n_head + n * n_kv // n_head) for n in range(n_head)], 1)
    v = torch.stack([head(n_head + n_kv + n * n_kv // n_head) for n in range(n_head)], 1)
    return q, k, v


def latent(
    x_BTC: Tensor, parameters: Mapping[str, Tensor], shift_BTR: Tensor | None = None
) -> Tensor:
    """Return c_k = x W_dk plus the shift from the previous block."""
    c_k = torch.einsum("btc,rc->btr", x_BTC, parameters["c_k.weight"])
    return c_k if shift_BTR is None else c_k + shift_BTR


def latent_heads(
    x_BTC: Tensor,
    parameters: Mapping[str, Tensor],
    n_head: int,
    options: LatentOptions,
    shift_BTR: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, BNTH, computed head by head."""
    width = x_BTC.shape[-1] // n_head
    c_k = latent(x_BTC, parameters, shift_BTR)
    c_v = torch.einsum("btc,rc->btr", x_BTC, parameters["c_v.weight"])
    stacked: tuple[list[Tensor], ...] = ([], [], [])
    for head in range(n_head):
        rows = slice(head * width, (head + 1) * width)
        expansion = slice(None) if options.shared_expansion else rows
        stacked[0].append(torch.einsum("btc,hc->bth", x_BTC, parameters["c_q.weight"][rows]))
        for into, c, name in ((stacked[1], c_k, "expand_k"), (stacked[2], c_v, "expand_v")):
            K_HR = parameters[f"{name}.weight"][expansion]
            into.append(torch.einsum("btr,hr->bth", c, K_HR))
    q, k, v = (torch.stack(part, 1) for part in stacked)
    return q, k, v


def full_sees(i: int, j: int, options: FullOptions) -> bool:
    """Return whether token i sees token j: j ≤ i."""
    return j <= i


def sliding_sees(i: int, j: int, options: SlidingOptions) -> bool:
    """Return whether token i sees token j: max(0, i − w + 1) ≤ j ≤ i."""
    return max(0, i - options.window + 1) <= j <= i


# The formula of each class of options, called with what precedes the options:
# projection   x BTC, parameters, number of heads, options, shift of c_k    q, k and v, BNTH
# transform    x BNTH, q or k, parameters, options                          x transformed
# positions    x BNTH, tokens, options                                      x at these positions
# pattern      i, j, options                                                whether i sees j
# score term   q and k BNTH, row, columns, parameters, options              addition to scores, BNc
# gate         weights BNc, row, parameters, options                        factor, BN
REFERENCES: dict[type[Any], Callable[..., Any]] = {
    DenseOptions: dense_heads,
    GroupedOptions: dense_heads,
    LatentOptions: latent_heads,
    LearnedOptions: unrotated,
    RopeOptions: rope_rotate,
    QkNormOptions: reference_norm,
    FullOptions: full_sees,
    SlidingOptions: sliding_sees,
    ReciprocalOptions: reference_scores,
    RaCrossTokenOptions: reference_factor,
    # A pattern that attends itself: see the function.
    NsaOptions: nsa.attend,
}
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Formulas:
    """The formulas of the components of one attention, with its parameters by name."""

    parameters: Parameters
    n_head: int
    options: AttentionConfig

    def heads(self, x_BTC: Tensor, shift_BTR: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of the projection, BNTH."""
        projection, weights = self.options.projection, self.subset("c_attn.")
        made: tuple[Tensor, Tensor, Tensor] = REFERENCES[type(projection)](
            x_BTC, weights, self.n_head, projection, shift_BTR
        )
        return made

    def transformed(self, x_BNTH: Tensor, side: str) -> Tensor:
        """Return queries (``side`` q) or keys (k), transformed."""
        for each in self.options.transforms:
            learned = self.subset(f"transforms.{each.name}.")
            x_BNTH = REFERENCES[type(each)](x_BNTH, side, learned, each)
        return x_BNTH

    def encoded(self, x_BNTH: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return queries or keys at the positions of ``tokens``."""
        positions = self.options.positions
        encoded: Tensor = REFERENCES[type(positions)](x_BNTH, tokens, positions)
        return encoded

    def rows(
        self, q_BNTH: Tensor, k_BNTH: Tensor, rows: Sequence[int]
    ) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
        """Yield row, visible columns, last softmax BNc, and factor of the output, BN."""
        tokens, pattern = range(q_BNTH.shape[2]), self.options.pattern
        q = self.encoded(self.transformed(q_BNTH, "q"), tokens)
        k = self.encoded(self.transformed(k_BNTH, "k"), tokens)
        sees = REFERENCES[type(pattern)]
        for i in rows:
            columns = [j for j in tokens if sees(i, j, pattern)]
            yield i, columns, *self._row(q, k, i, columns)

    def _row(self, q: Tensor, k: Tensor, i: int, columns: list[int]) -> tuple[Tensor, Tensor]:
        scores = (q[:, :, i : i + 1] * k[:, :, columns]).sum(-1) / q.shape[-1] ** 0.5
        for term in self.options.terms:
            weights = self.subset(f"terms.{term.name}.")
            scores = scores + REFERENCES[type(term)](q, k, i, columns, weights, term)
        first = torch.softmax(scores, -1)
        output_factor = torch.ones_like(scores[..., 0])
        scores_factor = torch.ones_like(output_factor)
        for gate in self.options.gates:
            factor = REFERENCES[type(gate)](first, i, self.subset(f"gates.{gate.name}."), gate)
            if gate.scales_scores:
                scores_factor = scores_factor * factor
            else:
                output_factor = output_factor * factor
        return torch.softmax(scores * scores_factor[..., None], -1), output_factor

    def project(self, out_BTC: Tensor) -> Tensor:
        """Return the output of ``c_proj``."""
        return out_BTC @ self.parameters["c_proj.weight"].T + self.parameters.get("c_proj.bias", 0)

    def subset(self, prefix: str) -> dict[str, Tensor]:
        """Return the parameters under ``prefix``, with the prefix removed."""
        named = self.parameters.items()
        return {k.removeprefix(prefix): v for k, v in named if k.startswith(prefix)}


def attention(
    x_BTC: Tensor,
    parameters: Parameters,
    n_head: int,
    options: AttentionConfig,
    request: AttentionWeightsOptions | None = None,
    head_scale_BTN: Tensor | None = None,
    latent_shift_BTR: Tensor | None = None,
    block: int = 0,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention output BTC without dropout, and the weights requested by the MLP, BTS.

    ``parameters`` are those of the built attention, by name; ``block`` is the layer index. Only the
    query tokens ``rows`` are computed and returned if they are given.
    """
    rows = range(x_BTC.shape[1]) if rows is None else rows
    formulas, pattern = _Formulas(parameters, n_head, options), options.pattern
    q, k, v = formulas.heads(x_BTC, latent_shift_BTR)
    if pattern.attends:
        out_BTNH = REFERENCES[type(pattern)](
            x_BTC,
            (formulas.transformed(q, "q"), k, v),
            formulas.subset("pattern."),
            pattern,
            options.projection,
            formulas.encoded,
            block,
            rows,
            partial(formulas.transformed, side="k"),
        )
        if head_scale_BTN is not None:
            out_BTNH = out_BTNH * head_scale_BTN[:, list(rows), :, None]
        return formulas.project(out_BTNH.flatten(2)), None
    outputs, shown = [], []
    for i, columns, p_BNc, factor_BN in formulas.rows(q, k, rows):
        out_BNH = torch.einsum("bnc,bnch->bnh", p_BNc, v[:, :, columns]) * factor_BN[..., None]
        if head_scale_BTN is not None:
            out_BNH = out_BNH * head_scale_BTN[:, i, :, None]
        outputs.append(out_BNH.flatten(1))
        if request:
            row_BS = x_BTC.new_zeros(x_BTC.shape[:2])
            row_BS[:, columns] = sparsify(p_BNc.mean(1), request)
            shown.append(row_BS)
    projected = formulas.project(torch.stack(outputs, 1))
    return projected, torch.stack(shown, 1) if request else None


def mean_entropy(
    x_BTC: Tensor,
    parameters: Parameters,
    n_head: int,
    options: AttentionConfig,
    latent_shift_BTR: Tensor | None = None,
) -> Tensor:
    """Return the mean over heads and rows of −Σ p ln p of the weights that multiply V, in nats."""
    formulas = _Formulas(parameters, n_head, options)
    q, k, _ = formulas.heads(x_BTC, latent_shift_BTR)
    rows = formulas.rows(q, k, range(x_BTC.shape[1]))
    return torch.stack([-torch.xlogy(p, p).sum(-1) for _, _, p, _ in rows]).mean()


def sparsify(mean_Bc: Tensor, request: AttentionWeightsOptions) -> Tensor:
    """Return rows sparsified according to ``request`` and renormalized."""
    rows = []
    for row_c in mean_Bc.detach() if request.detach else mean_Bc:
        if request.sparsity == "topk":
            keep = row_c >= row_c.sort(descending=True).values[: request.topk][-1]
        elif request.sparsity == "rms":
            keep = row_c >= request.tau * (row_c**2).mean().sqrt()
        else:
            keep = torch.ones_like(row_c, dtype=torch.bool)
        kept_c = row_c * keep
        # An empty row cannot be renormalized.
        rows.append(kept_c / kept_c.sum() if keep.any() else kept_c)
    return torch.stack(rows)
