"""A step of the trainer beside plain loops over GPT-2 of the same sizes, on the same drawn tokens.

    python -m gpt2.bench.step ROUNDS < VALUES.json

trains the configuration (symbol values), and GPT-2 without mechanisms in two other forms, in one
process and in turn. Prints side → seconds of each round as JSON. ``trainer`` is the trainer's step;
``transformers`` is GPT2LMHeadModel with SDPA and torch's AdamW; ``nanogpt`` has the form of nanoGPT:
modules of torch, GELU by the error function, and fused AdamW. The plain loops clip the gradient norm
at 1, with the precision, dropout, micro-batches and compilation of the configuration.

B batch, T tokens, C n_embd, N heads, H head dim, V vocabulary.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.bench.runner import take_turns
from gpt2.config import Config
from gpt2.shape import ModelShape
from gpt2.training.minimal import MinimalTraining
from lib.console import log, show
from lib.env.machine import autocast, set_up
from lib.env.preflight import require_machine
from lib.env.ranks import current_process
from lib.errors import EXIT_DONE, KablateError

_LEARNING_RATE = 1e-4
# The first steps compile, select kernels and grow the allocator.
_WARM_UP = 3


class PlainGPT(nn.Module):
    """GPT-2 of torch's modules, as a plain training script would write it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, self.heads, self.dropout = shape.n_embd, shape.n_head, shape.dropout
        self.wte = nn.Embedding(shape.padded_vocab_size, width)
        self.wpe = nn.Embedding(shape.block_size, width)
        parts = {"attn": (width, 3 * width), "proj": (width, width)}
        parts |= {"up": (width, 4 * width), "down": (4 * width, width)}
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
            x_BTC = x_BTC + drop(block["down"](F.gelu(block["up"](block["ln_2"](x_BTC)))))
        logits_BTV = F.linear(self.ln_f(x_BTC), self.wte.weight)
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def transformers_gpt(shape: ModelShape) -> nn.Module:
    """Return the GPT-2 of transformers with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = shape.dropout
    config = GPT2Config(
        vocab_size=shape.padded_vocab_size,
        n_positions=shape.block_size,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        resid_pdrop=drop,
        embd_pdrop=drop,
        attn_pdrop=drop,
        # Not in the signature, but a documented keyword.
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def transformers_loss(model: Callable[..., Tensor], tokens_BT: Tensor) -> Tensor:
    """Return the mean loss of GPT2LMHeadModel, which shifts the labels itself."""
    loss: Tensor = model(input_ids=tokens_BT[:, :-1], labels=tokens_BT[:, :-1], return_dict=False)[
        0
    ]
    return loss


def plain_step(
    config: Config, model: nn.Module, loss: Callable[..., Tensor], fused: bool, tokens_BT: Tensor
) -> Callable[[], None]:
    """Return a step of a plain loop; ``loss`` gets the model, possibly compiled, and tokens."""
    model.to(tokens_BT.device)
    forward = torch.compile(model) if config.machine.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=fused)
    count = config.train.grad_accumulation

    def step() -> None:
        for _ in range(count):
            with autocast(config.machine):
                part = loss(forward, tokens_BT) / count
            part.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def sides(config: Config, device: torch.device) -> dict[str, Callable[[], None]]:
    """Return the step of each side."""
    shape = config.model.shape
    size = config.train.batch_size, shape.block_size + 1
    tokens_BT = torch.randint(shape.vocab_size, size, device=device)
    training = MinimalTraining(config, device)
    training.state.model.train()
    micro_batches = config.train.grad_accumulation * [tokens_BT]
    plain = partial(plain_step, config, tokens_BT=tokens_BT)
    return {
        "trainer": lambda: training.step(micro_batches),
        "transformers": plain(transformers_gpt(shape), transformers_loss, False),
        "nanogpt": plain(PlainGPT(shape), lambda model, tokens: model(tokens), True),
    }


def measure(config: Config, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round by side. Raises PreflightError without the device."""
    require_machine(config.machine)
    device = set_up(config.machine, current_process())
    # The check reads values of the device at its interval.
    config = dataclasses.replace(config, numerics=dataclasses.replace(config.numerics, check=False))

    def seconds(step: Callable[[], None]) -> float:
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    times = take_turns(
        sides(config, device),
        _WARM_UP + rounds,
        seconds,
        lambda count: log("BENCH", f"{count} of {_WARM_UP + rounds} rounds"),
    )
    return {name: each[_WARM_UP:] for name, each in times.items()}


def main() -> int:
    """Measure the configuration on stdin."""
    config = Config.from_values(json.load(sys.stdin))
    try:
        show(json.dumps(measure(config, int(sys.argv[1]))))
    except KablateError as error:
        sys.stderr.write(f"ERROR   {error}\n")
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
