"""AdamWPrune trains by its base optimizer; the state pruner reads that one's moments."""

from lib.optim import BASES
from lib.optim.adam.module import Adam
from lib.optim.adamwprune.options import AdamwpruneOptions
from lib.optim.groups import ParameterGroup


class Adamwprune:
    """Builds the base: nothing is left to do around it, as ``state`` pruning does the rest."""

    def __new__(cls, groups: list[ParameterGroup], options: AdamwpruneOptions, lr: float) -> Adam:
        """An optimizer of the base's own class."""
        base: Adam = BASES.module(options.base.name)(groups, options.base, lr)
        return base
