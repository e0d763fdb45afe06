"""Small configurations with GPT-2's vocabulary."""

import pytest

from gpt2.study.resolve import resolve_config, step_layers
from gpt2.study.study_file import RATIO
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.project import ROOT

SMALL: dict[str, SymbolValue] = {
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 6,
    "N_HEAD": 4,
    "N_EMBD": 128,
    "BLOCK_SIZE": 256,
    "GLOBAL_BATCH": 8,
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 4,
}
# Gradient checkpointing and torch's memory tracker need uncompiled modules.
_EAGER: dict[str, SymbolValue] = {"COMPILE": False}


@pytest.fixture(scope="session")
def configure():
    """Return a builder of steps of the RATIO study; ``small=False`` keeps their size."""
    tree = KconfigTree()
    base = defconfig_layers(ROOT, "gpt2-ratio-ablation")

    def build(slug="baseline", /, small=True, **changes):
        step = next(step for step in RATIO.steps if step.slug == slug)
        symbols = _EAGER | (SMALL if small else {}) | changes
        layers = [*base, ConfigLayer.of("command line", "test", symbols), *step_layers(RATIO, step)]
        return resolve_config(tree, layers)

    return build
