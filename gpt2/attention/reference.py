"""Reference attention, computed row by row from the references of its components.

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, H head dim, R latent dim; c the
columns visible to a row. It shares no code with the trained model and is differentiable in any
float dtype. The formulas of score terms and gates are in the files of their modules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt2.attention.config import AttentionConfig
from gpt2.attention.cross_token import reference_factor
from gpt2.attention.options import (
    AttentionSinkOptions,
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
    ValueResidualOptions,
)
from gpt2.attention.qk_norm import reference_norm
from gpt2.attention.reciprocal import reference_scores
from gpt2.attention.sink import reference_weights
from gpt2.attention.value_residual import reference_values
from gpt2.nsa import reference as nsa
from gpt2.nsa.options import NsaOptions


def unrotated(x_BNTH: Tensor, tokens: Sequence[int], options: LearnedOptions) -> Tensor:
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
    c_k = torch.einsum("btc,rc->btr", x_BTC, parameters["c_k.weight"])
    return c_k if shift_BTR is None else c_k + shift_BTR


def latent_heads(
    x_BTC: Tensor,
    parameters: Mapping[str, Tensor],
    n_head: int,
    options: LatentOptions,
    shift_BTR: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    width = x_BTC.shape[-1] // n_head
    c_v = torch.einsum("btc,rc->btr", x_BTC, parameters["c_v.weight"])
    inputs = {"c_q": x_BTC, "expand_k": latent(x_BTC, parameters, shift_BTR), "expand_v": c_v}

    def head(name: str, index: int) -> Tensor:
        shared = options.shared_expansion and name != "c_q"
        rows = slice(None) if shared else slice(index * width, (index + 1) * width)
        return torch.einsum("btr,hr->bth", inputs[name], parameters[f"{name}.weight"][rows])

    q, k, v = (torch.stack([head(name, n) for n in range(n_head)], 1) for name in inputs)
    return q, k, v


def full_sees(i: int, j: int, options: FullOptions) -> bool:
    return j <= i


def sliding_sees(i: int, j: int, options: SlidingOptions) -> bool:
    return max(0, i - options.window + 1) <= j <= i


# The formula of each class of options, called with what precedes the options:
# projection   x BTC, parameters, number of heads, options, shift of c_k    q, k and v, BNTH
# transform    x BNTH, q or k, parameters, options                          x transformed
# positions    x BNTH, tokens, options                                      x at these positions
# pattern      i, j, options                                                whether i sees j
# score term   q and k BNTH, row, columns, parameters, options              addition to scores, BNc
# gate         weights BNc, row, parameters, options                        factor, BN
# sink         scores BNc, parameters, options                              weights of keys, BNc
# value mix    v and the first block's BNTH, parameters, options            v of a later block, BNTH
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
    AttentionSinkOptions: reference_weights,
    ValueResidualOptions: reference_values,
    # A pattern that attends itself: see the function.
    NsaOptions: nsa.attend,
}
Parameters = Mapping[str, Tensor]


class _Formulas:
    """The heads of an input, and the formulas of the components, with their parameters by name."""

    def __init__(
        self,
        x_BTC: Tensor,
        parameters: Parameters,
        n_head: int,
        options: AttentionConfig,
        shift_BTR: Tensor | None,
        values_BNTH: Tensor | None = None,
    ) -> None:
        self.parameters, self.options = parameters, options
        projection, weights = options.projection, self.subset("c_attn.")
        heads = REFERENCES[type(projection)](x_BTC, weights, n_head, projection, shift_BTR)
        self.q_BNTH, self.k_BNTH, self.v_BNTH = heads
        for mix in options.value_mixes if values_BNTH is not None else ():
            learned = self.subset(f"value_mixes.{mix.name}.")
            self.v_BNTH = REFERENCES[type(mix)](self.v_BNTH, values_BNTH, learned, mix)

    def subset(self, prefix: str) -> dict[str, Tensor]:
        named = self.parameters.items()
        return {k.removeprefix(prefix): v for k, v in named if k.startswith(prefix)}

    def transformed(self, x_BNTH: Tensor, side: str) -> Tensor:
        for each in self.options.transforms:
            learned = self.subset(f"transforms.{each.name}.")
            x_BNTH = REFERENCES[type(each)](x_BNTH, side, learned, each)
        return x_BNTH

    def encoded(self, x_BNTH: Tensor, tokens: Sequence[int]) -> Tensor:
        positions = self.options.positions
        encoded: Tensor = REFERENCES[type(positions)](x_BNTH, tokens, positions)
        return encoded

    def softmax(self, scores_BNc: Tensor) -> Tensor:
        for sink in self.options.sinks:
            learned = self.subset(f"sinks.{sink.name}.")
            weights: Tensor = REFERENCES[type(sink)](scores_BNc, learned, sink)
            return weights
        return torch.softmax(scores_BNc, -1)

    def rows(self, rows: Sequence[int]) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
        """Yield row, visible columns, last softmax BNc, and factor of the output, BN."""
        tokens, pattern = range(self.q_BNTH.shape[2]), self.options.pattern
        q = self.encoded(self.transformed(self.q_BNTH, "q"), tokens)
        k = self.encoded(self.transformed(self.k_BNTH, "k"), tokens)
        for i in rows:
            columns = [j for j in tokens if REFERENCES[type(pattern)](i, j, pattern)]
            scores = (q[:, :, i : i + 1] * k[:, :, columns]).sum(-1) / q.shape[-1] ** 0.5
            for term in self.options.terms:
                weights = self.subset(f"terms.{term.name}.")
                scores = scores + REFERENCES[type(term)](q, k, i, columns, weights, term)
            first = self.softmax(scores)
            output_factor = torch.ones_like(scores[..., 0])
            for gate in self.options.gates:
                weights = self.subset(f"gates.{gate.name}.")
                factor = REFERENCES[type(gate)](first, i, weights, gate)
                if gate.scales_scores:
                    scores = scores * factor[..., None]
                else:
                    output_factor = output_factor * factor
            yield i, columns, self.softmax(scores), output_factor


def attention(
    x_BTC: Tensor,
    parameters: Parameters,
    n_head: int,
    options: AttentionConfig,
    request: AttentionWeightsOptions | None = None,
    head_scale_BTN: Tensor | None = None,
    latent_shift_BTR: Tensor | None = None,
    values_BNTH: Tensor | None = None,
    block: int = 0,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output of the query tokens ``rows`` (all), BTC, and the weights that the MLP
    reads, BTS.

    ``parameters`` are those of the built attention, by name; ``values`` those of the first block;
    ``block`` is the layer index.
    """
    rows = range(x_BTC.shape[1]) if rows is None else rows
    formulas = _Formulas(x_BTC, parameters, n_head, options, latent_shift_BTR, values_BNTH)
    shown = []
    if options.pattern.attends:
        out_BTNH = REFERENCES[type(options.pattern)](
            x_BTC,
            (formulas.transformed(formulas.q_BNTH, "q"), formulas.k_BNTH, formulas.v_BNTH),
            formulas.subset("pattern."),
            options.pattern,
            options.projection,
            formulas.encoded,
            block,
            rows,
            partial(formulas.transformed, side="k"),
        )
    else:
        outputs = []
        for _, columns, p_BNc, factor_BN in formulas.rows(rows):
            out_BNH = torch.einsum("bnc,bnch->bnh", p_BNc, formulas.v_BNTH[:, :, columns])
            outputs.append(out_BNH * factor_BN[..., None])
            if request:
                shown.append(x_BTC.new_zeros(x_BTC.shape[:2]))
                shown[-1][:, columns] = sparsify(p_BNc.mean(1), request)
        out_BTNH = torch.stack(outputs, 1)
    if head_scale_BTN is not None:
        out_BTNH = out_BTNH * head_scale_BTN[:, list(rows), :, None]
    out_BTC = out_BTNH.flatten(2) @ parameters["c_proj.weight"].T + parameters.get("c_proj.bias", 0)
    return out_BTC, torch.stack(shown, 1) if shown else None


def values(x_BTC: Tensor, parameters: Parameters, n_head: int, options: AttentionConfig) -> Tensor:
    """Return the values of all heads, BNTH, of a block that mixes none."""
    return _Formulas(x_BTC, parameters, n_head, options, None).v_BNTH


def mean_statistics(
    x_BTC: Tensor,
    parameters: Parameters,
    n_head: int,
    options: AttentionConfig,
    latent_shift_BTR: Tensor | None = None,
    values_BNTH: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return means over heads and rows of the weights p that multiply V, and the share of ``values``.

    attention/entropy is −Σ p ln p in nats, attention_sink/share 1 − Σ p. The share of the first
    block's values is the norm of their part over that of the others.
    """
    formulas = _Formulas(x_BTC, parameters, n_head, options, latent_shift_BTR)
    weights = [p for _, _, p, _ in formulas.rows(range(x_BTC.shape[1]))]
    entropy = torch.stack([-torch.xlogy(p, p).sum(-1) for p in weights]).mean()
    rest = torch.stack([1 - p.sum(-1) for p in weights]).mean()
    found = {"attention/entropy": entropy} | {f"{sink.name}/share": rest for sink in options.sinks}
    for mix in options.value_mixes if values_BNTH is not None else ():
        learned, own_BNTH = formulas.subset(f"value_mixes.{mix.name}."), formulas.v_BNTH
        norms = [
            REFERENCES[type(mix)](*each, learned, mix).square().sum().sqrt()
            for each in ((own_BNTH, 0 * own_BNTH), (0 * own_BNTH, values_BNTH))
        ]
        found[f"{mix.name}/share"] = norms[1] / norms[0]
    return found


def sparsify(mean_Bc: Tensor, request: AttentionWeightsOptions) -> Tensor:
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
