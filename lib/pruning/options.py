"""What every pruner has to know: how much, of what, and when; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import ConfigError


@dataclass(frozen=True)
class PruningOptions:
    """``scope`` is global or layer, ``ramp`` cubic or linear; warm-up and ramp end are progress."""

    name: ClassVar[str]
    # The budget of a run that is pruned so, as a multiple of the one that is configured.
    stretch: ClassVar[float] = 1.0

    scope: ClassVar[str]
    ramp: ClassVar[str]

    target: float = symbol("PRUNING_SPARSITY", low=0.01, high=0.99)
    warmup: float = symbol("PRUNING_WARMUP", low=0.0, high=1.0)
    ramp_end: float = symbol("PRUNING_RAMP_END", low=0.0, high=1.0)
    # Optimizer steps between mask updates inside the ramp.
    frequency: int = symbol("PRUNING_FREQUENCY")
    include_embeddings: bool = symbol("PRUNING_INCLUDE_EMBEDDINGS")

    def __post_init__(self) -> None:
        if self.warmup >= self.ramp_end:
            raise ConfigError(
                f"PRUNING_WARMUP: {self.warmup:g} is not below PRUNING_RAMP_END={self.ramp_end:g}"
            )

    @property
    def summary(self) -> str:
        """One line for a plan."""
        ramp = f"{self.ramp} ramp {self.warmup:.0%} to {self.ramp_end:.0%} of the budget"
        return f"{self.name} {self.target:.0%}, {self.scope}, {ramp}"

    def sparsity_at(self, progress: float) -> float:
        """Sparsity wanted at ``progress``: 0, then the ramp, then the target.

        With x from 0 to 1 along the ramp: cubic s (1 − (1 − x)³), Zhu and Gupta (arXiv 1710.01878);
        linear s x.
        """
        if progress >= self.ramp_end:
            return self.target
        x = max(0.0, (progress - self.warmup) / (self.ramp_end - self.warmup))
        match self.ramp:
            case "cubic":
                return self.target * (1.0 - (1.0 - x) ** 3)
            case "linear":
                return self.target * x
        raise ValueError(f"unknown ramp {self.ramp!r}; known: cubic, linear")

    def layer_sparsities(self, reached: float, sizes: Sequence[int]) -> list[float]:
        """With scope layer, the sparsity of each matrix of ``sizes`` weights when the whole has
        ``reached``: the same for all.
        """
        return [reached] * len(sizes)


@dataclass(frozen=True)
class RampOptions(PruningOptions):
    """A pruner whose scope and ramp are chosen; others bring their own."""

    scope: str = symbol("PRUNING_SCOPE")
    ramp: str = symbol("PRUNING_RAMP")
