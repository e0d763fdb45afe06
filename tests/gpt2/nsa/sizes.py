"""Small sizes of native sparse attention, its branches, and full attention by formula."""

import itertools

import pytest
import torch

from gpt2.attention.options import GroupedOptions, LearnedOptions, RopeOptions
from gpt2.nsa.branches import attend_branches
from gpt2.nsa.cache import BranchKeyValues
from gpt2.nsa.module import compress_blocks
from gpt2.nsa.options import BRANCHES as NAMES
from gpt2.nsa.options import NsaOptions

PAIR = GroupedOptions(n_kv_head=2)
# 33 tokens are six blocks; a query selects three forced blocks and one by score.
SIZES = {"compress": 4, "stride": 2, "select": 6, "count": 4, "window": 5}
FORM = {"shared_kv": False, "phi": "mlp", "hidden": 3, "gate": "sigmoid"}
BRANCHES = {f"branch_{name}": True for name in ("compressed", "selected", "window")}
FORM |= {"select_by": "score", **BRANCHES}
FORM |= {"backend": "auto", "ranges": "", "ranges_min": 0}
# Backends of the selected branch.
BACKENDS = {
    "blocks": {"backend": "blocks"},
    "lists": {"backend": "gather", "ranges": "lists"},
    "merged": {"backend": "gather", "ranges": "merged"},
}
PAPER = {"compress": 32, "stride": 16, "select": 64, "count": 16, "window": 512}
SUBSETS = [c for k in (1, 2, 3) for c in itertools.combinations(NAMES, k)]


POSITIONS = [LearnedOptions(), RopeOptions(base=50.0)]


def turns(name, values):
    """Give each value one of the backends in turn."""
    pairs = [([*BACKENDS][i % len(BACKENDS)], value) for i, value in enumerate(values)]
    return pytest.mark.parametrize(("nsa", name), pairs, indirect=["nsa"])


def options(**given):
    return NsaOptions(**{**SIZES, **FORM, **given})


def pattern_of(branches, **given):
    return options(**{f"branch_{name}": name in branches for name in NAMES}, **given)


def forms():
    """Yield pattern and positions of all branches and selections, with keys of their own and without.

    Every branch meets both kinds of positions, of compression and of gates.
    """
    for branches in SUBSETS:
        kinds = ("score", "random") if "selected" in branches else ("score",)
        for kind, shared in itertools.product(kinds, (False, True)):
            turned = (kind == "random") ^ (len(branches) == 2)
            phi, gate = ("mlp", "mean")[shared ^ turned], ("sigmoid", "softmax")[turned]
            given = {"select_by": kind, "shared_kv": shared, "phi": phi, "gate": gate}
            label = "+".join((*branches, kind, *["shared"] * shared))
            yield pytest.param(pattern_of(branches, **given), POSITIONS[shared ^ turned], id=label)


every_form = pytest.mark.parametrize(("pattern", "positions"), list(forms()))


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def seen(given, t):
    """Return the number of keys of each branch that token t sees, by definition."""
    blocks = 0 if t + 1 < given.compress else (t + 1 - given.compress) // given.stride + 1
    chosen = (min(given.count, t // given.select + 1) - 1) * given.select
    return [blocks, chosen + t % given.select + 1, min(given.window, t + 1)]


def attended(q_BNTH, k_BKSH, v_BKSH, given):
    """Return the head outputs of each branch for shared keys and values."""
    blocks = compress_blocks(k_BKSH, given, None), compress_blocks(v_BKSH, given, None)
    keys = BranchKeyValues(blocks, (k_BKSH, v_BKSH), (k_BKSH, v_BKSH))
    first = k_BKSH.shape[2] - q_BNTH.shape[2]
    return dict(zip(NAMES, attend_branches(q_BNTH, keys, given, first), strict=True))
