"""Cases of a training step: the trainer beside plain loops over GPT-2 of the same sizes.

``transformers`` is GPT2LMHeadModel with SDPA and torch's AdamW; ``nanoGPT`` has the form of nanoGPT:
modules of torch and fused AdamW, with the biases and the activation of the configuration. The plain loops
clip the gradient norm at 1, with the precision, dropout, micro-batches and compilation of the
configuration.

B batch, T tokens, C n_embd, N heads, H head dim, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.bench.timing import Build, Case, Step
from gpt2.config import Config
from gpt2.mlp.activations import FUNCTIONS
from gpt2.mlp.options import ActivationOptions
from gpt2.model import GPT
from gpt2.shape import ModelShape
from gpt2.training.loop import step_on_tokens
from gpt2.training.state import build_state
from lib.env.machine import autocast

_LEARNING_RATE = 1e-4


class PlainGPT(nn.Module):
    """GPT-2 of torch's modules, as a plain training script would write it."""

    def __init__(self, shape: ModelShape, activation: ActivationOptions) -> None:
        super().__init__()
        width, self.heads, self.dropout = shape.n_embd, shape.n_head, shape.dropout
        self.activation = FUNCTIONS[type(activation)]
        self.wte = nn.Embedding(shape.padded_vocab_size, width)
        self.wpe = nn.Embedding(shape.block_size, width)
        parts = {"attn": (width, 3 * width), "proj": (width, width)}
        parts |= {"up": (width, activation.fc_outputs * 4 * width), "down": (4 * width, width)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {name: nn.Linear(*size) for name, size in parts.items()}
                | {"ln_1": nn.LayerNorm(width), "ln_2": nn.LayerNorm(width)}
            )
            for _ in range(shape.n_layer)
        )
        self.ln_f = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean loss of the next tokens of ``tokens_BT``, in nats."""
        drop = partial(F.dropout, p=self.dropout, training=True)
        x_BTC = drop(self.wte(tokens_BT[:, :-1]) + self.wpe.weight[: tokens_BT.shape[1] - 1])
        for module in self.blocks:
            block = cast(nn.ModuleDict, module)
            qkv = block["attn"](block["ln_1"](x_BTC)).unflatten(-1, (3, self.heads, -1))
            q_BNTH, k_BNTH, v_BNTH = qkv.permute(2, 0, 3, 1, 4)
            context_BNTH = F.scaled_dot_product_attention(
                q_BNTH, k_BNTH, v_BNTH, dropout_p=self.dropout, is_causal=True
            )
            x_BTC = x_BTC + drop(block["proj"](context_BNTH.transpose(1, 2).flatten(-2)))
            up_BTC = self.activation(block["up"](block["ln_2"](x_BTC)))
            x_BTC = x_BTC + drop(block["down"](up_BTC))
        logits_BTV = F.linear(self.ln_f(x_BTC), self.wte.weight)
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def transformers_gpt(shape: ModelShape) -> nn.Module:
    """Return the GPT-2 of transformers with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.padded_vocab_size,
        n_positions=shape.block_size,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout),
        # Not in the signature, but a documented keyword.
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def transformers_loss(model: Callable[..., tuple[Tensor, ...]], tokens_BT: Tensor) -> Tensor:
    """Return the mean loss of GPT2LMHeadModel, which shifts the labels itself."""
    inputs_BT = tokens_BT[:, :-1]
    return model(input_ids=inputs_BT, labels=inputs_BT, return_dict=False)[0]


def plain_step(
    config: Config, model: nn.Module, loss: Callable[..., Tensor], fused: bool, device: torch.device
) -> Step:
    """Return a step of a plain loop; ``loss`` gets the model, possibly compiled, and tokens."""
    model.to(device)
    forward = torch.compile(model) if config.machine.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=fused)
    tokens_BT, count = drawn_tokens(config, device), config.train.grad_accumulation

    def step() -> None:
        for _ in range(count):
            with autocast(config.machine):
                part = loss(forward, tokens_BT) / count
            part.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def drawn_tokens(config: Config, device: torch.device) -> Tensor:
    """Return random tokens BT of a micro-batch, one more per row than the context."""
    shape = config.model.shape
    size = config.train.batch_size, shape.block_size + 1
    return torch.randint(shape.vocab_size, size, device=device)


def trainer_step(config: Config, device: torch.device) -> Step:
    """Return the trainer's step on drawn tokens."""
    # The check reads values of the device at its interval.
    config = dataclasses.replace(config, numerics=dataclasses.replace(config.numerics, check=False))
    state = build_state(config, GPT(config.model), device=device)
    state.model.train()
    tokens = config.train.grad_accumulation * [drawn_tokens(config, device)]
    return lambda: step_on_tokens(state, tokens)


def nanogpt_step(config: Config, device: torch.device) -> Step:
    model = PlainGPT(config.model.shape, config.model.mlp.activation)
    return plain_step(config, model, lambda model, tokens: model(tokens), True, device)


def transformers_step(config: Config, device: torch.device) -> Step:
    model = transformers_gpt(config.model.shape)
    return plain_step(config, model, transformers_loss, False, device)


def step_case(label: str, config: Config, device: torch.device) -> Case:
    """Return the case of the configuration beside plain loops."""
    sides: dict[str, Build] = {
        "trainer": partial(trainer_step, config, device),
        "transformers": partial(transformers_step, config, device),
        "nanoGPT": partial(nanogpt_step, config, device),
    }
    return Case("A step", label, sides)
