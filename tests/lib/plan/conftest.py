"""Small Kconfig tree: two choices, a symbol enabled by one member, three features."""

from pathlib import Path

import pytest

from lib.config.tree import KconfigTree

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
def tree(tmp_path: Path) -> KconfigTree:
    (tmp_path / "Kconfig").write_text(KCONFIG)
    return KconfigTree(tmp_path)
