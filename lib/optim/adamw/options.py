"""Options of AdamW, and of every optimizer that is built on it."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class AdamwOptions:
    """Decoupled weight decay regularization (arXiv 1711.05101).

    The decay is given to the parameter groups, because only matrices decay.
    """

    name: ClassVar[str] = "adamw"

    beta1: float = symbol("ADAM_BETA1", low=0.0, high=1.0)
    beta2: float = symbol("ADAM_BETA2", low=0.0, high=1.0)
    eps: float = symbol("ADAM_EPS", low=0.0, high=1.0)
    weight_decay: float = symbol("WEIGHT_DECAY", low=0.0, high=100.0)

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError(*problems)

    @property
    def summary(self) -> str:
        """One line for a plan."""
        betas = f"betas {self.beta1:g} {self.beta2:g}"
        return f"{self.name}, {betas}, weight decay {self.weight_decay:g}"

    def _problems(self) -> list[Problem]:
        """All broken rules; an optimizer that adds rules extends the list."""
        betas = {"ADAM_BETA1": self.beta1, "ADAM_BETA2": self.beta2}
        return [
            Problem(f"{name}: {beta:g} never forgets a gradient; it must be below 1")
            for name, beta in betas.items()
            if beta >= 1.0
        ]
