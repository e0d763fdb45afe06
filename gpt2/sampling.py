"""From logits to a token: temperature, the k most likely tokens, and the nucleus.

V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. As it stands, from the model's own distribution.

    ConfigError where a value means nothing; each is named as make's variable.
    """

    # Divides the logits; 0 takes the most likely token.
    temperature: float = 1.0
    # Only the k most likely tokens; 0 for all.
    top_k: int = 0
    # Only the smallest set of most likely tokens whose probabilities add up to this (nucleus
    # sampling, Holtzman et al. 2020, arXiv 1904.09751).
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        # Written so that not-a-number is refused too.
        if not 0 <= self.temperature < float("inf"):
            problems.append(Problem(f"{self.temperature} is not a number >= 0", "TEMPERATURE"))
        if self.top_k < 0:
            problems.append(Problem(f"{self.top_k} is not a number >= 0", "TOP_K"))
        if not 0 < self.top_p <= 1:
            problems.append(Problem(f"{self.top_p} is not above 0 and at most 1", "TOP_P"))
        if problems:
            raise ConfigError(*problems)

    def distribution(self, logits_V: Tensor) -> Tensor:
        """The probability of every token, in fp32, at a temperature above 0.

        First the k most likely are kept, then of these the nucleus. Of equal ones the lower id
        counts as the more likely.
        """
        # The division is in fp64 and of numbers <= 0: a tiny temperature gives 0 and -inf, no NaN.
        below_V = (logits_V.float() - logits_V.max()).double() / self.temperature
        weights_V = torch.softmax(below_V.float(), dim=-1)
        if self.top_k == 0 and self.top_p == 1:
            return weights_V
        ordered_V, ids_V = weights_V.sort(descending=True, stable=True)
        if self.top_k:
            ordered_V[self.top_k :] = 0
        ordered_V /= ordered_V.sum()
        # A token is in the nucleus when those before it do not add up to p yet.
        before_V = ordered_V.cumsum(0) - ordered_V
        if self.top_p < 1:
            ordered_V[before_V >= self.top_p] = 0
        return torch.zeros_like(weights_V).scatter_(0, ids_V, ordered_V / ordered_V.sum())

    def draw(self, logits_V: Tensor, generator: Generator) -> int:
        """A token, as id. At temperature 0 nothing is drawn from ``generator``."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        weights_V = self.distribution(logits_V)
        return int(torch.multinomial(weights_V, 1, generator=generator))
