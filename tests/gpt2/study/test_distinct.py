"""I6: the steps of a study are different functions, but for those that only train differently."""

import itertools

import pytest
import torch

from gpt2.model import GPT
from gpt2.study.resolve import resolve_study
from gpt2.study.study_file import STUDIES
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.project import ROOT

SHALLOW = {"MODEL_SIZE_CUSTOM": True, "N_LAYER": 1, "N_EMBD": 64, "N_HEAD": 4}


# The mechanisms' window has to hide something: it is 64. That of NSA's control is 511.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("defconfig", "study", "settings", "equal"),
    [
        ("gpt2-ratio-small", "ratio", {"BLOCK_SIZE": 32}, {("baseline", "pruned-50")}),
        (
            "gpt2-ratio-small",
            "mechanisms",
            {"BLOCK_SIZE": 80},
            {("ra", "ra-learnable"), ("ract", "ract-detached"), ("cross", "cross-attached")},
        ),
        # Biases start at 0, and an optimizer begins after the start.
        (
            "gpt2-modern-small",
            "modern",
            {"BLOCK_SIZE": 32},
            {("baseline", "no-muon"), ("baseline", "biases"), ("no-muon", "biases")},
        ),
        (
            "gpt2-parts-small",
            "parts",
            {"BLOCK_SIZE": 32},
            {("baseline", "muon"), ("baseline", "no-biases"), ("muon", "no-biases")},
        ),
        ("nsa-quickstart", "nsa", SHALLOW | {"BLOCK_SIZE": 576}, {("nsa", "nsa-softmax")}),
    ],
)
def test_i6_different_steps_are_different_functions(tree, defconfig, study, settings, equal):
    """Parameters of the same name and shape are equal in every step."""
    layers = [*defconfig_layers(ROOT, defconfig), ConfigLayer.of("command line", "test", settings)]
    shape = (1, settings["BLOCK_SIZE"])
    tokens = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    logits = {}
    for variant, config in resolve_study(tree, layers, STUDIES[study], STUDIES[study].steps)[0]:
        model = GPT(config.model).eval()
        model.init_weights(config.seed)
        with torch.no_grad():
            logits[variant.slug] = model(tokens)
    same = {
        (a, b)
        for a, b in itertools.combinations(logits, 2)
        if torch.allclose(logits[a], logits[b], rtol=0, atol=1e-6)
    }
    assert same == equal
