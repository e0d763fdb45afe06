"""What the configuration gives where nothing is said."""

from lib.kconfig import Layer, Tree
from lib.pruning import PRUNERS


def _bound(tree: Tree, **settings: bool):
    return PRUNERS.bind(tree.resolve([Layer.of("test", "test", settings)]).values)[0]


def test_nothing_is_pruned_by_default(tree: Tree) -> None:
    assert _bound(tree).name == "none"
    assert tree.kconf.syms["PRUNING_SPARSITY"].visibility == 0


def test_magnitude_binds_from_defaults(tree: Tree) -> None:
    options = _bound(tree, PRUNING_MAGNITUDE=True)
    assert options.summary == "magnitude 50%, global, cubic ramp 10% to 75% of the budget"
    assert (options.frequency, options.include_embeddings) == (10, False)


def test_state_brings_its_own_scope_and_ramp(tree: Tree) -> None:
    options = _bound(tree, OPTIMIZER_ADAMWPRUNE=True)
    expected = "state 50%, global, linear ramp 10% to 75% of the budget, bitter0"
    assert options.summary == expected
    assert tree.kconf.named_choices["PRUNING_RAMP"].visibility == 0
    assert tree.kconf.named_choices["PRUNING_SCOPE"].visibility == 0
