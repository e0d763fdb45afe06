"""AdamWPrune: trains with its base optimizer; the state pruner reads the base's moments."""

from lib.optim import BASES
from lib.optim.adam.module import Adam
from lib.optim.adamwprune.options import AdamwpruneOptions
from lib.optim.groups import ParameterGroup


class Adamwprune:
    """Factory of the base optimizer; ``state`` pruning does the rest of AdamWPrune."""

    def __new__(cls, groups: list[ParameterGroup], options: AdamwpruneOptions, lr: float) -> Adam:
        """Return an optimizer of the base's class."""
        base: Adam = BASES.module(options.base.name)(groups, options.base, lr)
        return base
