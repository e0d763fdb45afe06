"""Writing text with a model, a token at a time.

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

# A prompt is read in pieces: attention to a cache has a score for each pair of a piece's tokens and
# all before them.
_PIECE = 128


def generate(
    model: GPT,
    prompt_T: Tensor,
    seed: int,
    machine: MachineConfig,
    sampling: Sampling = Sampling(),
) -> Iterator[int]:
    """Endless tokens after ``prompt_T`` (T ≥ 1), as ids; drawn from a generator of its own.

    A token's context is the last ``block_size`` tokens. As long as they are all that there are, a
    cache holds what was computed for them. From then on the whole window is run anew for each
    token: positions are learned, so every token of it has moved to another one.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.wte.weight.device
    block_size = model.config.shape.block_size
    ids = [int(i) for i in prompt_T]
    cache, waiting = model.new_cache(), ids[-block_size:]
    while True:
        if cache.position + len(waiting) > block_size:
            cache, waiting = model.new_cache(), ids[-block_size:]
        with _evaluating(model), autocast(machine):
            for piece_T in torch.tensor(waiting, device=device).split(_PIECE):
                hidden_BTC = model.hidden(piece_T[None], cache)
            logits_V = model.logits(hidden_BTC[0, -1]).cpu()
        token = sampling.draw(logits_V, generator)
        ids, waiting = [*ids[1 - block_size :], token], [token]
        yield token


@contextmanager
def _evaluating(model: GPT) -> Iterator[None]:
    """Without dropout and gradients; not held between tokens, when the model is its caller's."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
