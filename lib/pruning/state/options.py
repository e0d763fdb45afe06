"""Options of state pruning; a variant defines score, ramp, scope and budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.pruning.options import PruningOptions

# Maximum sparsity of a matrix in a per-layer profile, unless the target itself is higher.
CAP = 0.98


@dataclass(frozen=True)
class Variant:
    """Ramp, scope and budget of a variant; ``stretch`` multiplies the budget."""

    ramp: str = "cubic"
    scope: str = "global"
    stretch: float = 1.0


VARIANTS = {
    "bitter0": Variant(ramp="linear"),
    "bitter1": Variant(ramp="linear"),
    "bitter2": Variant(ramp="linear", stretch=1.21),
    "bitter3": Variant(stretch=1.3),
    "bitter4": Variant(scope="layer", stretch=1.3),
    "bitter5": Variant(),
    "bitter6": Variant(),
    "bitter7": Variant(),
    "bitter8": Variant(),
    "bitter9": Variant(),
}


@dataclass(frozen=True)
class StateOptions(PruningOptions):
    """Options of state pruning; ``stretched`` enables the variant's longer budget."""

    name: ClassVar[str] = "state"

    variant: str = symbol("ADAMWPRUNE_VARIANT")
    stretched: bool = symbol("ADAMWPRUNE_STRETCH")

    @property
    def ramp(self) -> str:
        """Return the variant's ramp."""
        return VARIANTS[self.variant].ramp

    @property
    def scope(self) -> str:
        """Return the variant's scope."""
        return VARIANTS[self.variant].scope

    @property
    def stretch(self) -> float:
        """Return the run's budget as a multiple of the configured budget."""
        return VARIANTS[self.variant].stretch if self.stretched else 1.0

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        longer = "" if self.stretch == 1.0 else f", budget x {self.stretch:g}"
        return f"{super().summary}, {self.variant}{longer}"

    def layer_sparsities(self, reached: float, sizes: Sequence[int]) -> list[float]:
        """Return c (0.7 + 0.6 i / (L − 1)) for matrix i of L, at most ``CAP``: sparser with depth.

        c is chosen so that the mean over all weights is ``reached``.
        """
        last = max(1, len(sizes) - 1)
        profile = [0.7 + 0.6 * i / last for i in range(len(sizes))]
        return rescaled(profile, sizes, reached, max(CAP, reached))


def rescaled(
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
