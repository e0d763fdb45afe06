"""Cases of a GPU, beside the forms of others: steps of GPT-2 124M, the loss, and sparse attention.

C n_embd, X tokens, V vocabulary; B, T, N, H as in the other modules.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.bench.commands import Symbols, step_config
from gpt2.bench.nsa import Heads, nsa_options, prefill_cases
from gpt2.bench.step import nanogpt_step, trainer_step
from gpt2.bench.timing import Build, Case, Step
from gpt2.loss import fused_loss, linear_cross_entropy, masked_cross_entropy

_LENGTHS = (8192, 16384, 65536)


def step_cases(device: torch.device, symbols: Symbols) -> list[Case]:
    """Return the cases of a step, eager and compiled, with and without dropout."""
    cases = []
    for dropout, is_compiled in (("0.1", True), ("0.0", True), ("0.1", False), ("0.0", False)):
        changes = {"COMPILE": is_compiled, "DROPOUT": dropout, **symbols}
        baseline = step_config("baseline", changes)
        sides: dict[str, Build] = {
            "baseline": partial(trainer_step, baseline, device),
            "nanoGPT": partial(nanogpt_step, baseline, device),
        }
        if is_compiled and dropout == "0.1":
            for slug in ("ra", "full"):
                sides[slug] = partial(trainer_step, step_config(slug, changes), device)
        form = "compiled" if is_compiled else "eager"
        cases.append(Case("A step, of one micro-batch", f"{form}, dropout {dropout}", sides))
    return cases


def loss_case(device: torch.device, tokens: int, width: int, vocab_size: int) -> Case:
    """Return the case of the loss and its gradients; the head has padding rows."""
    padded = -(-vocab_size // 64) * 64

    def side(form: Callable[[], Callable[..., Tensor]]) -> Step:
        loss = form()
        torch.manual_seed(0)
        hidden_XC = torch.randn(tokens, width, device=device, requires_grad=True)
        weight_VC = (torch.randn(padded, width, device=device) * 0.02).requires_grad_()
        targets_X = torch.randint(vocab_size, (tokens,), device=device)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(hidden_XC, weight_VC, targets_X, vocab_size)
            torch.autograd.grad(value, (hidden_XC, weight_VC))

        return step

    def plain(hidden_XC: Tensor, weight_VC: Tensor, targets_X: Tensor, vocab_size: int) -> Tensor:
        return F.cross_entropy(F.linear(hidden_XC, weight_VC)[:, :vocab_size].float(), targets_X)

    forms: dict[str, Callable[[], Any]] = {
        "compiled": lambda: torch.compile(masked_cross_entropy),
        "chunks": lambda: linear_cross_entropy,
        "liger-kernel": lambda: partial(linear_cross_entropy, fused=fused_loss("triton", device)),
        "F.cross_entropy, compiled": lambda: torch.compile(plain),
    }
    sides = {name: partial(side, form) for name, form in forms.items()}
    return Case("The loss", f"{tokens:,} tokens of {vocab_size:,}", sides)


def sparse_cases(heads: Heads, tokens: int) -> list[Case]:
    """Return the cases of sparse attention with blocks of 64, beside full attention.

    Compressed and selected branch, as kernels of other libraries have them.
    """
    options = nsa_options(
        NSA_BRANCH_WINDOW=False, NSA_PHI_MEAN=True, NSA_COMPRESS_BLOCK=64, NSA_COMPRESS_STRIDE=64
    )
    table = f"Sparse attention, {heads.query} heads of {heads.width} over {heads.key}"
    return prefill_cases(table, "compressed and selected", options, heads, tokens)


def gpu_cases(device: torch.device) -> list[Case]:
    heads = Heads(64, 4, 128, device)
    return [
        *step_cases(device, {}),
        loss_case(device, 32768, 768, 50257),
        *(case for tokens in _LENGTHS for case in sparse_cases(heads, tokens)),
    ]
