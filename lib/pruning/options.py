"""Pruners that a configuration can select, and their options; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from lib.config.field import kconfig_field
from lib.config.registry import Registry
from lib.config.small_form import always
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class NoneOptions:
    """Empty options of the pruner that prunes nothing."""

    name: ClassVar[str] = "none"

    @property
    def stretch(self) -> float:
        """Return the budget of a run with this pruner, as a multiple of the configured budget."""
        return 1.0

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        return self.name


@dataclass(frozen=True)
class PruningOptions(NoneOptions):
    """Options of a pruner: ``scope`` global or layer, ``ramp`` cubic or linear.

    ``warmup`` and ``ramp_end`` are fractions of the budget.
    """

    # Fields of some pruners, computed by others. Properties at run time would hide the fields.
    if TYPE_CHECKING:

        @property
        def scope(self) -> str: ...

        @property
        def ramp(self) -> str: ...

    # Within the few iterations of a small form the ramp needs steps, and the loss has to fall.
    target: float = kconfig_field("PRUNING_SPARSITY", low=0.01, high=0.99)
    warmup: float = kconfig_field("PRUNING_WARMUP", low=0.0, high=1.0)
    ramp_end: float = kconfig_field("PRUNING_RAMP_END", low=0.0, high=1.0)
    # Optimizer steps between mask updates inside the ramp.
    frequency: int = kconfig_field("PRUNING_FREQUENCY", small=always(1))
    include_embeddings: bool = kconfig_field("PRUNING_INCLUDE_EMBEDDINGS")

    def __post_init__(self) -> None:
        if self.warmup >= self.ramp_end:
            what = f"must be < PRUNING_RAMP_END={self.ramp_end:g}, got {self.warmup:g}"
            raise ConfigError(Problem(f"PRUNING_WARMUP: {what}", code="config.conflict"))

    @property
    def summary(self) -> str:
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
        return self.target * (x if self.ramp == "linear" else (1.0 - (1.0 - x) ** 3))

    def layer_sparsities(self, reached: float, sizes: Sequence[int]) -> list[float]:
        """Return the sparsity of each matrix, of so many weights, if the whole model has ``reached``."""
        return [reached] * len(sizes)


@dataclass(frozen=True)
class MagnitudeOptions(PruningOptions):
    """Options of magnitude pruning (score |w|), with a configurable scope and ramp."""

    name: ClassVar[str] = "magnitude"

    scope: str = kconfig_field("PRUNING_SCOPE")
    ramp: str = kconfig_field("PRUNING_RAMP")


@dataclass(frozen=True)
class MovementOptions(MagnitudeOptions):
    """Options of movement pruning (score −Σ g w): those of magnitude pruning."""

    name: ClassVar[str] = "movement"


# Maximum sparsity of a matrix in a per-layer profile, unless the target itself is higher.
MAX_LAYER_SPARSITY = 0.98


class PruningVariant(NamedTuple):
    """Ramp, scope and budget of a variant; ``stretch`` multiplies the budget."""

    ramp: str = "cubic"
    scope: str = "global"
    stretch: float = 1.0


PRUNING_VARIANTS = {
    "bitter0": PruningVariant(ramp="linear"),
    "bitter1": PruningVariant(ramp="linear"),
    "bitter2": PruningVariant(ramp="linear", stretch=1.21),
    "bitter3": PruningVariant(stretch=1.3),
    "bitter4": PruningVariant(scope="layer", stretch=1.3),
    "bitter5": PruningVariant(),
    "bitter6": PruningVariant(),
    "bitter7": PruningVariant(),
    "bitter8": PruningVariant(),
    "bitter9": PruningVariant(),
}


@dataclass(frozen=True)
class StateOptions(PruningOptions):
    """Options of state pruning; ``stretched`` enables the variant's longer budget."""

    name: ClassVar[str] = "state"

    variant: str = kconfig_field("ADAMWPRUNE_VARIANT")
    stretched: bool = kconfig_field("ADAMWPRUNE_STRETCH")

    @property
    def ramp(self) -> str:
        return PRUNING_VARIANTS[self.variant].ramp

    @property
    def scope(self) -> str:
        return PRUNING_VARIANTS[self.variant].scope

    @property
    def stretch(self) -> float:
        return PRUNING_VARIANTS[self.variant].stretch if self.stretched else 1.0

    @property
    def summary(self) -> str:
        longer = "" if self.stretch == 1.0 else f", budget x {self.stretch:g}"
        return f"{super().summary}, {self.variant}{longer}"

    def layer_sparsities(self, reached: float, sizes: Sequence[int]) -> list[float]:
        """Return c (0.7 + 0.6 i / (L − 1)) for matrix i of L, at most MAX_LAYER_SPARSITY.

        c is chosen so that the mean over all weights is ``reached``.
        """
        last = max(1, len(sizes) - 1)
        profile = [0.7 + 0.6 * i / last for i in range(len(sizes))]
        return rescale_profile(profile, sizes, reached, max(MAX_LAYER_SPARSITY, reached))


def rescale_profile(
    profile: Sequence[float], sizes: Sequence[int], mean: float, cap: float
) -> list[float]:
    """Return min(cap, c · profile), with c such that the mean weighted by ``sizes`` is ``mean``.

    Requires ``mean`` ≤ ``cap``.
    """
    capped: set[int] = set()
    while True:
        free = [i for i in range(len(sizes)) if i not in capped]
        remaining = mean * sum(sizes) - cap * sum(sizes[i] for i in capped)
        # Without a free matrix, all matrices are at the cap, and mean equals cap.
        scale = remaining / sum(sizes[i] * profile[i] for i in free) if free else 0.0
        over = {i for i in free if scale * profile[i] > cap}
        if not over:
            return [cap if i in capped else scale * profile[i] for i in range(len(sizes))]
        capped |= over


PRUNERS: Registry[NoneOptions] = Registry(
    "pruner", NoneOptions, MagnitudeOptions, MovementOptions, StateOptions, choice="PRUNING"
)
