"""I6: the steps of the study are different functions, not different names for one."""

import itertools

import torch

from gpt2.ablation.ratio import RATIO
from gpt2.ablation.resolve import resolve_study
from gpt2.model import GPT
from lib.kconfig import Layer, Tree, defconfig_layers
from lib.project import ROOT


def test_i6_different_steps_are_different_functions():
    short = Layer.of("command line", "test", {"BLOCK_SIZE": 32})
    steps = resolve_study(Tree(), [*defconfig_layers(ROOT, "gpt2-quickstart"), short], RATIO)
    tokens_BT = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    logits = {}
    for found in steps:
        # Parameters of the same name and shape get the same values in every step.
        model = GPT(found.config.model).eval()
        model.init_weights(found.config.seed)
        with torch.no_grad():
            logits[found.step.slug] = model(tokens_BT)
    same = {
        (a, b)
        for a, b in itertools.combinations(logits, 2)
        if torch.allclose(logits[a], logits[b], rtol=0, atol=1e-6)
    }
    # Pruning acts on training, not on the function; its configuration differs in that alone.
    assert same == {("baseline", "pruned-50")}
    assert steps[1].config.pruning.name == "magnitude" != steps[0].config.pruning.name
