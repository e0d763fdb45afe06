"""Plans of a small configuration, full configurations, and a small Kconfig tree."""

import pytest

from gpt2.study.plan import config_layers, make_plan
from lib.config.layers import ConfigLayer, parse_text
from lib.config.tree import KconfigTree
from tests.build_folder import write_build

SMALL = {"DEVICE_CPU": True, "MODEL_SIZE_TINY": True, "TOKENIZER_BYTE": True, "MAX_ITERS": 100}

# Two choices, a symbol enabled by one member, three features.
KCONFIG = """
choice OPTIMIZER
    prompt "Optimizer"
    default OPTIMIZER_ADAMW
config OPTIMIZER_ADAMW
    bool "adamw"
config OPTIMIZER_SPAM
    bool "spam"
endchoice

choice PRUNING
    prompt "Pruning"
    default PRUNING_NONE
config PRUNING_NONE
    bool "none"
config PRUNING_MOVEMENT
    bool "movement"
    depends on OPTIMIZER_ADAMW
endchoice
config SPARSITY
    string "Sparsity"
    depends on PRUNING_MOVEMENT
    default "0.5"
config GATE
    bool "Gate"
config WIDE
    bool "Wide"
config CROSS
    bool "Cross"
    depends on GATE
config N_LAYER
    int "Layers"
    range 1 8
    default 2
config RATE
    string "Rate"
    default "0.1"
config SEED
    int "Seed"
    default 1
"""


@pytest.fixture
def small_tree(tmp_path):
    (tmp_path / "Kconfig").write_text(KCONFIG)
    return KconfigTree(tmp_path)


@pytest.fixture(scope="session")
def tree():
    return KconfigTree()


@pytest.fixture(autouse=True)
def one_tree(tree, monkeypatch):
    """Parse the Kconfig files once for all plans, which takes longer than to resolve one."""
    monkeypatch.setattr("gpt2.study.plan.KconfigTree", lambda: tree)


@pytest.fixture(scope="session")
def full_config(tree):
    """The .config of some settings, every symbol written out."""

    def make(**settings):
        given = {"DEVICE_CPU": True, "OPTIMIZER_ADAMWSPAM": True, "RA_MLA_ABLATION_MODE": True}
        text = tree.config_text([ConfigLayer.of("defconfig", "test", {**given, **settings})])
        return parse_text(text, "config", ".config")

    return make


@pytest.fixture
def configure(tmp_path):
    """Return a function that writes a .config and returns its build folder; None removes a symbol."""

    def write(**settings):
        symbols = {k: v for k, v in {**SMALL, **settings}.items() if v is not None}
        return write_build(tmp_path, symbols)

    return write


@pytest.fixture
def planned(configure):
    def plan(steps="", seeds="", sweep="", **settings):
        build = configure(**settings)
        return make_plan(config_layers(build), build, steps=steps, seeds=seeds, sweep=sweep)

    return plan
