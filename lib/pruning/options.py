"""Options common to pruners: sparsity, scope and schedule; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class PruningOptions:
    """Options of a pruner: ``scope`` global or layer, ``ramp`` cubic or linear.

    ``warmup`` and ``ramp_end`` are fractions of the budget.
    """

    name: ClassVar[str]
    # Budget of a run with this pruner, as a multiple of the configured budget.
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
            what = f"must be < PRUNING_RAMP_END={self.ramp_end:g}, got {self.warmup:g}"
            raise ConfigError(Problem(f"PRUNING_WARMUP: {what}", code="config.conflict"))

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        ramp = f"{self.ramp} ramp {self.warmup:.0%} to {self.ramp_end:.0%} of the budget"
        return f"{self.name} {self.target:.0%}, {self.scope}, {ramp}"

    def sparsity_at(self, progress: float) -> float:
        """Return the target sparsity at ``progress``: 0, then the ramp, then the final target s.

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
        """Return the sparsity of each matrix for scope layer, if the whole model has ``reached``.

        ``sizes`` are the weights of each matrix. By default, all matrices have the same sparsity.
        """
        return [reached] * len(sizes)


@dataclass(frozen=True)
class RampOptions(PruningOptions):
    """Options of a pruner with configurable scope and ramp; other pruners define both."""

    scope: str = symbol("PRUNING_SCOPE")
    ramp: str = symbol("PRUNING_RAMP")
