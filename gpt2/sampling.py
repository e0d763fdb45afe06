"""Sampling of a token from logits: temperature, top-k and nucleus (top-p).

V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class Sampling:
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
        wrong = []
        # The comparisons are written so that NaN is rejected too.
        if not 0 <= self.temperature < float("inf"):
            wrong.append(("TEMPERATURE", ">= 0 and finite", self.temperature))
        if self.top_k < 0:
            wrong.append(("TOP_K", ">= 0", self.top_k))
        if not 0 < self.top_p <= 1:
            wrong.append(("TOP_P", "> 0 and <= 1", self.top_p))
        if wrong:
            raise ConfigError(
                *(
                    Problem(f"must be {expected}, got {value}", name, code="usage.out-of-range")
                    for name, expected, value in wrong
                )
            )

    def distribution(self, logits_V: Tensor) -> Tensor:
        """Return the probability of every token in fp32, for a temperature above 0.

        Top-k is applied first, then the nucleus. Ties are broken in favor of the lower token id.
        """
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
