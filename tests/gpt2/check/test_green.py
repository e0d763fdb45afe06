"""Configurations at which checks once failed, with nothing wrong."""

import pytest
import torch

from gpt2.check import CHECKS
from gpt2.check.cases import Case
from gpt2.check.draw import resolved
from gpt2.check.run import run_here
from lib.kconfig import Tree
from lib.repro.rng import rng_state, set_rng_state


@pytest.fixture(autouse=True)
def _as_before():
    """What training sets for a whole process."""
    state, threads = rng_state(torch.device("cpu")), torch.get_num_threads()
    yield
    set_rng_state(state, torch.device("cpu"))
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


RIGHT = {
    # It has none of Adam's symbols, and moves some weights by less than fp32 holds.
    "sgd": ("gradients,steps,pruned", {"OPTIMIZER_SGD": "y", "MLP_ATTN_GATE": "y"}),
    # Its base is AdamW: what makes it another optimizer is the pruner.
    "adamwprune": ("pruned", {"OPTIMIZER_ADAMWPRUNE": "y"}),
    # Gates are not pruned.
    "gates": (
        "pruned",
        {"PRUNING_MAGNITUDE": "y", "MLP_ATTN_GATE": "y", "MLP_SIZING_RATIO": "y"},
    ),
    # Rows of padding are zero beside what is pruned.
    "padding": (
        "pruned",
        {
            "PRUNING_MOVEMENT": "y",
            "PRUNING_INCLUDE_EMBEDDINGS": "y",
            "VOCAB_MULTIPLE": "1024",
        },
    ),
    # The variant trains for longer: the ramp ends in the last of its iterations.
    "stretched": (
        "pruned,reload",
        {"OPTIMIZER_ADAMWPRUNE": "y", "ADAMWPRUNE_VARIANT_BITTER2": "y", "PRUNING_RAMP_END": "0.9"},
    ),
    # Every gradient of the mechanism is zero, here and by the formulas.
    "strength 0": ("reference", {"MLP_ATTN_GATE": "y", "MLP_ATTN_GATE_ALPHA": "0"}),
    # No weight of any row is kept.
    "tau": (
        "reference",
        {
            "MLP_CROSS_TOKEN": "y",
            "MLP_CROSS_TOKEN_SPARSITY_RMS": "y",
            "MLP_CROSS_TOKEN_TAU": "10",
        },
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_green(name):
    checks, settings = RIGHT[name]
    case = Case("a", "a", "a", resolved(Tree(), settings))
    found = run_here(case, [CHECKS[check] for check in checks.split(",")], {})
    assert {check: result.findings for check, result in found.items() if result.findings} == {}
