"""Autoregressive text generation with a model.

B batch, T tokens, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpt2.model import GPT
from gpt2.sampling import Sampling
from lib.machine.options import MachineConfig
from lib.machine.setup import autocast

# Tokens of the prompt per prefill step: cached attention computes a score for every pair of a new
# and an earlier token.
_PREFILL_TOKENS = 128


def generate(
    model: GPT,
    prompt_T: Tensor,
    seed: int,
    machine: MachineConfig,
    sampling: Sampling = Sampling(),
) -> Iterator[int]:
    """Yield token ids after ``prompt_T`` (T ≥ 1) without end, sampled from a dedicated RNG.

    The context of a token is the last ``block_size`` tokens. Until the sequence reaches that
    length, the KV cache is reused. After that, the whole window is recomputed for each token: the
    position of every token in the window has changed.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.wte.weight.device
    block_size = model.config.shape.block_size
    ids = [int(i) for i in prompt_T]
    cache, pending = model.new_cache(), ids[-block_size:]
    while True:
        if cache.position + len(pending) > block_size:
            cache, pending = model.new_cache(), ids[-block_size:]
        with _evaluating(model), autocast(machine):
            for piece_T in torch.tensor(pending, device=device).split(_PREFILL_TOKENS):
                hidden_BTC = model.hidden(piece_T[None], cache)
            logits_V = model.logits(hidden_BTC[0, -1]).cpu()
        token = sampling.draw(logits_V, generator)
        ids, pending = [*ids[1 - block_size :], token], [token]
        yield token


@contextmanager
def _evaluating(model: GPT) -> Iterator[None]:
    """Switch to evaluation mode without gradients, and restore the mode on exit.

    It is entered per token, because the caller may use the model between two tokens.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
