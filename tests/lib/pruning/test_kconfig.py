"""Tests of the Kconfig defaults of pruning."""

from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.pruning.options import PRUNERS


def _bound(tree: KconfigTree, **settings: bool):
    return PRUNERS.bind(tree.resolve([ConfigLayer.of("test", "test", settings)]).values)[0]


def test_nothing_is_pruned_by_default(tree: KconfigTree) -> None:
    assert _bound(tree).name == "none"
    assert tree.kconf.syms["PRUNING_SPARSITY"].visibility == 0


def test_magnitude_binds_from_defaults(tree: KconfigTree) -> None:
    options = _bound(tree, PRUNING_MAGNITUDE=True)
    assert (options.target, options.scope, options.ramp) == (0.5, "global", "cubic")
    assert (options.warmup, options.ramp_end) == (0.1, 0.75)
    assert (options.frequency, options.include_embeddings) == (10, False)
    assert options.summary.startswith("magnitude 50%, global, cubic ")


def test_state_brings_its_own_scope_and_ramp(tree: KconfigTree) -> None:
    options = _bound(tree, OPTIMIZER_ADAMWPRUNE=True)
    assert (options.variant, options.scope, options.ramp) == ("bitter0", "global", "linear")
    assert options.summary.startswith("state 50%, global, linear ")
    assert options.summary.endswith(", bitter0")
    assert tree.kconf.named_choices["PRUNING_RAMP"].visibility == 0
    assert tree.kconf.named_choices["PRUNING_SCOPE"].visibility == 0
