"""Widths of the MLP: the study's table, every step's ratio, and where a ratio is refused."""

from typing import Any

import pytest

from gpt2.model_config import ModelConfig
from gpt2.study.resolve import resolve_config
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.project import ROOT
from tests.gpt2.builders import make_model_config

GATE, CROSS, COUPLING = "mlp_attn_gate", "mlp_cross_token", "mlp_latent"
BOTH = (CROSS, GATE)
# C → heads
HEADS = {768: 12, 1024: 16, 128: 4, 96: 4}
BASELINE: dict[str, Any] = {}
GOLDEN = {"sizing": "ratio", "ratio": 2.5}
MECH = {**GOLDEN, "mechanisms": BOTH, "share": 0.20}
MLA = {"projection": "latent"}
RA = {"terms": ("reciprocal",)}
RACT = {"gates": ("ra_cross_token",)}
# Combinations as in the RATIO study. Without a ratio the MLP keeps 4C units.
STEPS: dict[str, dict[str, Any]] = {
    "baseline": BASELINE,
    "golden": GOLDEN,
    "golden-gate": {**GOLDEN, "mechanisms": (GATE,), "share": 0.15},
    "golden-gate-cross": MECH,
    "ra": RA,
    "ra-golden": RA | GOLDEN,
    "ra-golden-mech": RA | MECH,
    "mla": MLA,
    "mla-golden": MLA | GOLDEN,
    "mla-golden-mech": MLA | MECH,
    "ra-mla-golden": RA | MLA | GOLDEN,
    "ra-mla-golden-mech": RA | MLA | MECH,
    "ract": RACT,
    "mla-ract": RACT | MLA | GOLDEN,
    "ra-mla-ract": RACT | RA | MLA | GOLDEN,
    "full": RACT | RA | MLA | MECH,
}


def at_width(n_embd: int, **overrides: Any) -> ModelConfig:
    """Twelve layers of a width, with GPT-2's heads."""
    n_head = HEADS.get(n_embd, 4)
    return make_model_config(n_layer=12, n_embd=n_embd, n_head=n_head, **overrides)


def widths(config: ModelConfig, block: int) -> dict[str, int]:
    """M and every mechanism's own width."""
    size = config.mlp.size(config.sites()[block])
    return {"M": size.hidden, **size.widths}


@pytest.mark.parametrize("n_embd", HEADS)
@pytest.mark.parametrize("step", STEPS)
def test_every_block_has_its_ratio(step, n_embd):
    config = at_width(n_embd, **STEPS[step])
    # 8C² of an MLP to 4C² of dense attention, or to 2C² + 4CR of latent attention.
    given = 2.0
    if step == "mla":
        given = 8 * n_embd / (2 * n_embd + 4 * config.attention.projection.width(config.shape))
    ratio = config.mlp.ratio if config.mlp.sizing == "ratio" else given

    for site in config.sites():
        config.mlp.check_ratio(site)
        assert config.mlp.built_ratio(site) == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_embd", HEADS)
@pytest.mark.parametrize("step", [*STEPS, "rope", "swiglu"])
def test_every_step_has_the_parameters_of_gpt2(step, n_embd, bias):
    others = {"rope": {"positions": "rope"}, "swiglu": {"activation": "swiglu"}}
    change = (STEPS | others)[step]
    config = at_width(n_embd, **change | {"sizing": "params", "bias": bias}).sized()

    # Half of eight units, of which each has a half more weights in SwiGLU.
    expected, rel = at_width(n_embd, bias=bias).num_params(), 0.0075 if step == "swiglu" else 0.005
    assert config.num_params() == pytest.approx(expected, rel=rel)
    config.mlp.check_params(config.shape, config.num_params())


def test_a_unit_of_swiglu_has_three_rows_in_place_of_two():
    given = {"activation": "swiglu", "hidden": 2048}
    gated, plain = (at_width(768, **each, bias=False) for each in (given, {}))
    assert gated.num_params() == plain.num_params()
    assert gated.flops_per_token() == plain.flops_per_token()
    golden = at_width(768, activation="swiglu", **GOLDEN)
    assert widths(golden, 0) == {"M": 2560} and widths(at_width(768, **GOLDEN), 0) == {"M": 3840}


def test_a_number_of_parameters_selects_the_width():
    # 12 layers of 64 units more than the baseline's, with biases.
    more = at_width(768).num_params() + 12 * 64 * (2 * 768 + 1)
    sized = at_width(768, sizing="params", model_params=more).sized()

    assert (widths(sized, 0), sized.num_params()) == ({"M": 3136}, more)


def test_the_number_of_parameters_is_in_the_identity_if_it_applies():
    tree, base = KconfigTree(), defconfig_layers(ROOT, "gpt2-ratio-small")
    given = resolve_config(tree, base)
    settings = {"MLP_SIZING_PARAMS": True, "POSITIONS_ROPE": True}
    sized = resolve_config(tree, [*base, ConfigLayer.of("command line", "SET", settings)])

    assert "model_params" not in given.identity()["model"]["mlp"]
    assert sized.identity()["model"]["mlp"]["model_params"] == 0
    assert sized.model.num_params() == pytest.approx(given.model.num_params(), rel=0.001)


@pytest.mark.parametrize("tying", ["tied", "untied", "scalar"])
@pytest.mark.parametrize("n_embd", HEADS)
def test_the_coupling_is_paid_from_the_ratio(tying, n_embd):
    parts = {COUPLING: {"tying": tying}}
    overrides = MLA | MECH | {"mechanisms": (COUPLING, *BOTH), "parts": parts}
    config = at_width(n_embd, **overrides)

    for site in config.sites():
        assert config.mlp.built_ratio(site) == pytest.approx(config.mlp.ratio, rel=0.01)


def test_a_given_width_is_taken_at_any_size():
    for hidden, units in ((0, 128), (100, 100)):
        config = at_width(32, hidden=hidden, mechanisms=(GATE,), parts={GATE: {"dim": 5}})
        config.mlp.check_ratio(config.sites()[0])
        assert widths(config, 0) == {"M": units, GATE: 5}
        assert widths(config, 11) == {"M": units}


@pytest.mark.parametrize(
    ("n_embd", "overrides", "what", "code"),
    [
        *((n, GOLDEN, f"N_EMBD={n} .*N_EMBD >= 96", "ratio-unreachable") for n in (32, 64, 92)),
        # 19.2 units become 16.
        (96, GOLDEN | {"ratio": 0.1}, "^MLP_RATIO: .*block 0", "ratio-unreachable"),
        (
            768,
            {"sizing": "params", "model_params": 1_000_000},
            "^MODEL_PARAMS: .*1,000,000",
            "params-unreachable",
        ),
    ],
)
def test_a_size_that_no_width_reaches_is_refused(n_embd, overrides, what, code):
    config = at_width(n_embd, **overrides).sized()

    with pytest.raises(ConfigError, match=what) as caught:
        config.mlp.check_params(config.shape, config.num_params())
        config.mlp.check_ratio(config.sites()[0])
    assert caught.value.codes == [f"config.{code}"]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("LATENT_DIM=3 MLP_LATENT_TYING_SCALAR=y", True),
        ("LATENT_DIM=4 MLP_LATENT_TYING_SCALAR=y", False),
        ("LATENT_DIM=64 MLP_HIDDEN=40 MLP_LATENT_TYING_SCALAR=y", True),
        ("LATENT_DIM=3 MLP_LATENT_TYING_TIED=y", False),
    ],
)
def test_a_scalar_that_no_unit_would_use_is_refused(settings, refused):
    given = f"ATTENTION_PROJECTION_LATENT=y MLP_LATENT=y {settings}"
    layers = defconfig_layers(ROOT, "gpt2-ratio-small", given)
    if not refused:
        assert resolve_config(KconfigTree(), layers).model.shape.n_head == 4
        return
    with pytest.raises(ConfigError, match="SET: MLP_LATENT_TYING: .*got 4, "):
        resolve_config(KconfigTree(), layers)
