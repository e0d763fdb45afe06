"""I6: the steps of a study are different functions, or train differently."""

import itertools

import pytest
import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.model import GPT
from gpt2.study.resolve import resolve_study
from gpt2.study.step import Study
from gpt2.study.study_file import STUDIES
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.project import ROOT

RATIO, MECHANISMS, NSA = (STUDIES[name] for name in ("ratio", "mechanisms", "nsa"))

# Steps that start as the function of their parent; what they train is in the tests below.
EQUAL = {
    "ratio": {("baseline", "pruned-50")},
    "mechanisms": {("ra", "ra-learnable"), ("ract", "ract-detached"), ("cross", "cross-attached")},
    "nsa": {("nsa", "nsa-softmax")},
}


def configs(study: Study, block_size: int) -> dict[str, Config]:
    short = ConfigLayer.of("command line", "test", {"BLOCK_SIZE": block_size})
    defconfig = "nsa-quickstart" if study is NSA else "gpt2-ratio-small"
    steps = resolve_study(
        KconfigTree(), [*defconfig_layers(ROOT, defconfig), short], study, study.steps
    )[0]
    return {variant.slug: config for variant, config in steps}


def built(config: Config) -> tuple[GPT, Tensor]:
    """A model and its logits. Parameters of the same name and shape are equal in every step."""
    model = GPT(config.model).eval()
    model.init_weights(config.seed)
    shape = (2, config.model.shape.block_size)
    return model, model(torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)))


# The mechanisms' window has to hide something: it is 64. That of NSA's control is 511.
@pytest.mark.parametrize(
    ("study", "block_size"),
    [
        (RATIO, 32),
        pytest.param(MECHANISMS, 80, marks=pytest.mark.slow),
        pytest.param(NSA, 576, marks=pytest.mark.slow),
    ],
)
def test_i6_different_steps_are_different_functions(study, block_size):
    steps = configs(study, block_size)
    with torch.no_grad():
        logits = {slug: built(config)[1] for slug, config in steps.items()}
    same = {
        (a, b)
        for a, b in itertools.combinations(logits, 2)
        if torch.allclose(logits[a], logits[b], rtol=0, atol=1e-6)
    }
    assert same == EQUAL[study.name]


def test_pruning_acts_on_training_and_so_on_the_configuration_alone():
    steps = configs(RATIO, 32)
    assert steps["pruned-50"].pruning.name == "magnitude" != steps["baseline"].pruning.name


@pytest.mark.parametrize(
    ("study", "block_size", "parent", "step"),
    [
        *((MECHANISMS, 32, *pair) for pair in sorted(EQUAL["mechanisms"])),
        *((NSA, 272, *pair) for pair in sorted(EQUAL["nsa"])),
    ],
)
def test_steps_that_start_as_the_same_function_train_differently(study, block_size, parent, step):
    steps = configs(study, block_size)
    gradients = []
    for slug in (parent, step):
        model, logits = built(steps[slug])
        logits.logsumexp(-1).mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    its, found = gradients
    learned = found.keys() - its.keys()
    assert learned == {f"h.{i}.attn.terms.reciprocal.alpha" for i in range(4) if "ra-l" in step}
    assert all(found[name].count_nonzero() for name in learned)
    differ = {name for name in its if not torch.allclose(its[name], found[name], atol=0)}
    # A learned constant changes no other gradient of the first step.
    assert bool(differ) is not bool(learned)
