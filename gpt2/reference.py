"""Reference GPT-2 computed from its formulas, built from the attention and MLP references.

B batch, T tokens, C n_embd, V vocabulary. It shares no code with the trained model and is
differentiable in any float dtype. Slow: for comparisons on small shapes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2 import lora
from gpt2 import norm as norms
from gpt2.attention.options import LatentOptions
from gpt2.attention.reference import attention, latent, values
from gpt2.attention.state import AttentionOutputs, BlockState
from gpt2.mlp.mlp import reference_mlp, reference_request
from gpt2.mlp.options import LayerSpec
from gpt2.model_config import ModelConfig

Parameters = Mapping[str, Tensor]


def reference_gpt(
    idx_BT: Tensor,
    parameters: Parameters,
    config: ModelConfig,
) -> Tensor:
    """Return logits [B, T, vocab_size] without dropout.

    ``parameters`` are those of the built model, by name.
    """
    parameters = with_adapters(parameters, config)
    x_BTC = parameters["wte.weight"][idx_BT]
    if not config.attention.positions.rotates:
        x_BTC = x_BTC + parameters["wpe.weight"][: idx_BT.shape[1]]
    state = BlockState()
    for site in config.sites():
        x_BTC, state = _block(x_BTC, state, _subset(parameters, f"h.{site.block}."), config, site)
    head = "lm_head" if config.untied_head else "wte"
    head_VC = parameters[f"{head}.weight"][: config.shape.vocab_size]
    norm = norms.REFERENCES[type(config.norm)]
    return norm(x_BTC, _subset(parameters, "ln_f.")) @ head_VC.T


def reference_loss(logits_BTV: Tensor, targets_BT: Tensor, z_loss: float) -> Tensor:
    """Return the mean of −log p + c log² Z over the targets that are not −100, with p = exp(logit) / Z."""
    terms = []
    for logits_V, target in zip(logits_BTV.flatten(0, 1), targets_BT.flatten(), strict=True):
        if target != -100:
            log_z = logits_V.exp().sum().log()
            terms.append(log_z - logits_V[target] + z_loss * log_z * log_z)
    return torch.stack(terms).mean()


def _block(
    x_BTC: Tensor,
    state: BlockState,
    parameters: Parameters,
    config: ModelConfig,
    site: LayerSpec,
) -> tuple[Tensor, BlockState]:
    norm = norms.REFERENCES[type(config.norm)]
    normed_BTC = norm(x_BTC, _subset(parameters, "ln_1."))
    attn = _subset(parameters, "attn.")
    inputs = state.head_scale_BTN, state.latent_shift_BTR, state.values_BKTH
    n_head, request = config.shape.n_head, reference_request(site, config.mlp)
    out_BTC, weights_BTS = attention(
        normed_BTC, attn, n_head, config.attention, request, *inputs, site.block
    )
    x_BTC = x_BTC + out_BTC
    latent_BTR = None
    if isinstance(config.attention.projection, LatentOptions):
        latent_BTR = latent(normed_BTC, _subset(attn, "c_attn."), state.latent_shift_BTR)
    first_BNTH = state.values_BKTH
    if config.attention.value_mixes and first_BNTH is None:
        first_BNTH = values(normed_BTC, attn, n_head, config.attention)
    view = AttentionOutputs(weights_BTS, latent_BTR)
    normed_BTC = norm(x_BTC, _subset(parameters, "ln_2."))
    mixed_BTC, state = reference_mlp(
        normed_BTC, view, _subset(parameters, "mlp."), site, config.mlp
    )
    state.values_BKTH = first_BNTH
    return x_BTC + mixed_BTC, state


def with_adapters(parameters: Parameters, config: ModelConfig) -> dict[str, Tensor]:
    """Return the parameters with the adapted matrices in place of the frozen ones."""
    adapted = dict(parameters)
    for options in config.adapters:
        for up in [name for name in parameters if name.endswith(".adapter.up.weight")]:
            layer = up.removesuffix(".adapter.up.weight")
            frozen, down = (parameters[f"{layer}{end}.weight"] for end in ("", ".adapter.down"))
            formula = lora.REFERENCES[type(options)]
            adapted[f"{layer}.weight"] = formula(frozen, down, parameters[up], options)
    return adapted


def _subset(parameters: Parameters, prefix: str) -> dict[str, Tensor]:
    """Return the parameters under ``prefix``, with the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in parameters.items() if k.startswith(prefix)}
