"""Movement scores in plain Python."""

from lib.pruning.movement.options import MovementOptions
from lib.pruning.seen import Seen


class MovementReference:
    """Scalar reference of MovementPruner."""

    def __init__(self, options: MovementOptions) -> None:
        self.options = options

    def scores(self, seen: Seen) -> list[float]:
        """Return −Σ g w of each weight over all steps."""
        return [
            -sum(gradients[i] * weights[i] for gradients, weights in seen.history)
            for i in range(len(seen.weights))
        ]
