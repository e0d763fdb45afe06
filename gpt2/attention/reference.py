"""Reference attention, computed row by row from the references of its components.

B batch, T tokens (queries), S tokens (keys), C n_embd, N heads, H head dim, R latent dim; c the
columns visible to a row. It shares no code with the trained model and is differentiable in any
float dtype. The reference of a component is the module ``reference`` next to its options.
"""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpt2.attention.options import AttentionConfig
from gpt2.attention.state import WeightsRequest

Parameters = Mapping[str, Tensor]


def attention(
    x_BTC: Tensor,
    parameters: Parameters,
    n_head: int,
    options: AttentionConfig,
    request: WeightsRequest | None = None,
    head_scale_BTN: Tensor | None = None,
    latent_shift_BTR: Tensor | None = None,
    block: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention output BTC without dropout, and the weights requested by the MLP, BTS.

    ``parameters`` are those of the built attention, by name; ``block`` is the layer index.
    """
    q, k, v = _heads(x_BTC, parameters, n_head, options, latent_shift_BTR)
    if options.pattern.attends:
        pattern = _subset(parameters, "pattern.")
        out_BTNH = _reference(options.pattern).attend(x_BTC, q, k, v, pattern, options, block)
        if head_scale_BTN is not None:
            out_BTNH = out_BTNH * head_scale_BTN[..., None]
        return _project(out_BTNH.flatten(2), parameters), None
    sees = _reference(options.pattern).sees
    length = x_BTC.shape[1]
    if options.positions.rotates:
        rotated = _reference(options.positions).rotated
        q, k = (rotated(x, range(length), options.positions) for x in (q, k))
    outputs, shown = [], []
    for i in range(length):
        columns = [j for j in range(length) if sees(i, j, options.pattern)]
        p_BNc, factor_BN = _row(q, k, i, columns, parameters, options)
        out_BNH = torch.einsum("bnc,bnch->bnh", p_BNc, v[:, :, columns]) * factor_BN[..., None]
        if head_scale_BTN is not None:
            out_BNH = out_BNH * head_scale_BTN[:, i, :, None]
        outputs.append(out_BNH.flatten(1))
        if request:
            row_BS = x_BTC.new_zeros(x_BTC.shape[0], length)
            row_BS[:, columns] = thin_out(p_BNc.mean(1), request)
            shown.append(row_BS)
    projected = _project(torch.stack(outputs, 1), parameters)
    return projected, torch.stack(shown, 1) if request else None


def thin_out(mean_Bc: Tensor, request: WeightsRequest) -> Tensor:
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


def _project(out_BTC: Tensor, parameters: Parameters) -> Tensor:
    projected = out_BTC @ parameters["c_proj.weight"].T
    return projected + parameters["c_proj.bias"] if "c_proj.bias" in parameters else projected


def _row(
    q: Tensor,
    k: Tensor,
    i: int,
    columns: list[int],
    parameters: Parameters,
    options: AttentionConfig,
) -> tuple[Tensor, Tensor]:
    """Return the last softmax of row i, BNc, and the factor of its output, BN."""
    scores = (q[:, :, i : i + 1] * k[:, :, columns]).sum(-1) / q.shape[-1] ** 0.5
    for term in options.terms:
        weights = _subset(parameters, f"terms.{term.name}.")
        scores = scores + _reference(term).score(q, k, i, columns, weights, term)
    first = torch.softmax(scores, -1)
    output_factor = torch.ones_like(scores[..., 0])
    scores_factor = torch.ones_like(output_factor)
    for gate in options.gates:
        weights = _subset(parameters, f"gates.{gate.name}.")
        factor = _reference(gate).factor(first, i, weights, gate)
        if _reference(gate).scales_scores(gate):
            scores_factor = scores_factor * factor
        else:
            output_factor = output_factor * factor
    return torch.softmax(scores * scores_factor[..., None], -1), output_factor


def _heads(
    x_BTC: Tensor,
    parameters: Parameters,
    n_head: int,
    options: AttentionConfig,
    latent_shift_BTR: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    projection, weights = options.projection, _subset(parameters, "c_attn.")
    kwargs: dict[str, Any] = {}
    if latent_shift_BTR is not None:
        kwargs["shift_BTR"] = latent_shift_BTR
    return _reference(projection).heads(x_BTC, weights, n_head, projection, **kwargs)


def _reference(part: object) -> ModuleType:
    return import_module(type(part).__module__.removesuffix("options") + "reference")


def _subset(parameters: Parameters, prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in parameters.items() if k.startswith(prefix)}
