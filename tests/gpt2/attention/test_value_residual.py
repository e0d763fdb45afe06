"""Value residual: limits of λ, blocks that have it, statistics, types, refusals."""

import pytest
import torch

from gpt2.mechanism_statistics import collect_statistics
from gpt2.model import GPT
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from tests.gpt2.builders import make_model_config
from tests.gpt2.test_mechanism_statistics import built, given_to, tokens

MIX = {"value_mixes": ("value_residual",), "n_layer": 3}


def mixing(share, learnable=True, **given):
    """Return a random model whose blocks mix values by ``share``."""
    part = {"share": share, "learnable": learnable}
    model = built(**MIX, **given, parts={"value_residual": part})
    for block in model.h[1:] if learnable else ():
        block.attn.value_mixes["value_residual"].share.data.fill_(share)
    return model


def values_of(block):
    """Return the rows of the values in the matrix of a dense projection."""
    return block.attn.c_attn.weight.data[-block.attn.shape.n_embd :]


@torch.no_grad()
def test_a_share_of_1_is_no_residual_and_one_of_0_reads_the_first_block_alone():
    alone, mixed = mixing(1.0), built(n_layer=3)
    mixed.load_state_dict(alone.state_dict(), strict=False)
    idx_BT = tokens(alone)
    torch.testing.assert_close(alone(idx_BT), mixed(idx_BT), atol=1e-12, rtol=0)
    model = mixing(0.0)
    before = model(idx_BT)
    for block in model.h[1:]:
        values_of(block).normal_()
    assert torch.equal(model(idx_BT), before)
    values_of(model.h[0]).normal_()
    assert not torch.equal(model(idx_BT), before)


@pytest.mark.parametrize("learnable", [True, False])
def test_later_blocks_have_a_share_that_starts_as_configured(learnable):
    given = {"value_residual": {"share": 0.3, "learnable": learnable}}
    model = GPT(make_model_config(**MIX, parts=given))
    model.init_weights(0)
    found = {n: p.tolist() for n, p in model.named_parameters() if "value_mixes" in n}
    names = [f"h.{i}.attn.value_mixes.value_residual.share" for i in (1, 2)] * learnable
    assert found == {name: [pytest.approx(0.3)] for name in names}


def test_the_statistic_is_the_part_of_the_first_block_relative_to_the_other():
    model = mixing(0.2)
    first, own = (
        given_to(model, model.h[i].attn)[0] @ values_of(model.h[i]).T
        + model.h[i].attn.c_attn.bias[-model.config.shape.n_embd :]
        for i in (0, 2)
    )
    statistics = collect_statistics(model, tokens(model))["value_residual/share"]
    expected = (0.8 * first).norm() / (0.2 * own).norm()
    assert statistics == [None, pytest.approx(statistics[1]), pytest.approx(expected.item())]


@pytest.mark.parametrize("learnable", [True, False])
def test_values_keep_their_type(learnable):
    """Those of a kernel of attention have the type of queries and keys."""
    model = mixing(0.3, learnable).float()
    seen = []
    model.h[1].attn.value_mixes["value_residual"].register_forward_hook(
        lambda part, given, out: seen.append((given[0].dtype, given[1].dtype, out.dtype))
    )
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens(model))
    assert seen == [(torch.bfloat16,) * 3]


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ({"MODEL_SIZE_CUSTOM": True, "N_LAYER": 1}, "N_LAYER > 1"),
        (
            {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True},
            "ATTENTION_PATTERN_NSA=n",
        ),
    ],
)
def test_models_without_a_later_block_or_with_other_values_are_refused(given, needs):
    layer = ConfigLayer.of("defconfig", "test", given | {"VALUE_RESIDUAL": True})
    with pytest.raises(ConfigError) as caught:
        KconfigTree().resolve([layer])
    (problem,) = caught.value.problems
    assert problem.code == "config.unmet-dependency"
    assert problem.what.startswith(f"VALUE_RESIDUAL=y: needs {needs}")
