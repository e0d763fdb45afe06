"""Movement scores on plain lists."""

from lib.pruning.movement.options import MovementOptions
from lib.pruning.seen import Seen


class MovementReference:
    """What MovementPruner adds up, one number at a time."""

    def __init__(self, options: MovementOptions) -> None:
        self.options = options

    def scores(self, seen: Seen) -> list[float]:
        """−Σ g w of each weight over all steps."""
        return [
            -sum(gradients[i] * weights[i] for gradients, weights in seen.history)
            for i in range(len(seen.weights))
        ]
