"""Autoregressive text generation with a model.

B batch, T tokens, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gpt2.model import GPT
from lib.env.machine import autocast
from lib.env.options import MachineConfig
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options; the defaults sample from the model's unmodified distribution.

    Raises ConfigError, with the name of the make variable, if a value is out of range.
    """

    # Divides the logits; 0 selects the most likely token (greedy decoding).
    temperature: float = 1.0
    # Sample from the k most likely tokens only; 0 disables top-k.
    top_k: int = 0
    # Sample from the smallest set of most likely tokens whose probabilities sum to at least top_p
    # (nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751).
    top_p: float = 1.0

    def __post_init__(self) -> None:
        # The comparisons are written so that NaN is rejected too.
        for name, expected, value, valid in (
            ("TEMPERATURE", ">= 0 and finite", self.temperature, 0 <= self.temperature < math.inf),
            ("TOP_K", ">= 0", self.top_k, self.top_k >= 0),
            ("TOP_P", "> 0 and <= 1", self.top_p, 0 < self.top_p <= 1),
        ):
            if not valid:
                what, advice = f"out of range (expected {expected}, got {value})", "type: make help"
                raise ConfigError(Problem(what, name, advice, code="usage.out-of-range"))

    def distribution(self, logits_V: Tensor) -> Tensor:
        """Return the probability of every token in fp32: of the top k, then the nucleus, lower ids first."""
        # Divide values <= 0 in fp64: a tiny temperature then gives 0 and -inf, never NaN.
        below_V = (logits_V.float() - logits_V.max()).double() / self.temperature
        weights_V = torch.softmax(below_V.float(), dim=-1)
        if self.top_k == 0 and self.top_p == 1:
            return weights_V
        ordered_V, ids_V = weights_V.sort(descending=True, stable=True)
        if self.top_k:
            ordered_V[self.top_k :] = 0
        ordered_V /= ordered_V.sum()
        # A token is in the nucleus if the more likely tokens sum to less than p.
        before_V = ordered_V.cumsum(0) - ordered_V
        if self.top_p < 1:
            ordered_V[before_V >= self.top_p] = 0
        return torch.zeros_like(weights_V).scatter_(0, ids_V, ordered_V / ordered_V.sum())

    def draw(self, logits_V: Tensor, generator: Generator) -> int:
        """Return the id of a sampled token; temperature 0 does not use ``generator``."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        weights_V = self.distribution(logits_V)
        return int(torch.multinomial(weights_V, 1, generator=generator))


# Tokens of the prompt per prefill step: cached attention computes a score for every pair of a new
# and an earlier token.
_PREFILL_TOKENS = 128


def generate(
    model: GPT,
    prompt_T: Tensor,
    seed: int,
    machine: MachineConfig,
    sampling: SamplingOptions = SamplingOptions(),
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
        # For each token, because the caller may train between two.
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), autocast(machine):
                for piece_T in torch.tensor(pending, device=device).split(_PREFILL_TOKENS):
                    hidden_BTC = model.hidden(piece_T[None], cache)
                logits_V = model.logits(hidden_BTC[0, -1]).cpu()
        finally:
            model.train(training)
        token = sampling.draw(logits_V, generator)
        ids, pending = [*ids[1 - block_size :], token], [token]
        yield token
