"""Widths of the steps of the RATIO study, and defects of a study."""

import pytest

from gpt2.study.resolve import resolve_study
from gpt2.study.step import Step, Study
from gpt2.study.study_file import RATIO
from lib.config.layers import ConfigLayer
from tests.errors import error_of

# Steps and, at C = 768, hidden units, gate and mix widths of the first block, then of the last, which
# has no next block to gate. Computed by hand: attention has 4C² weights, latent attention
# 2C² + 4CR; r of that is shared as the study declares and rounded to 64 and 8.
WIDTHS = [
    (
        ("baseline", "pruned-50", "ra", "mla", "ract", "ract-weights", "ract-entropy"),
        (3072, 0, 0),
        (3072, 0, 0),
    ),
    (("golden", "ra-golden"), (3840, 0, 0), (3840, 0, 0)),
    (("golden-gate",), (3264, 272, 0), (3840, 0, 0)),
    (("golden-gate-cross", "ra-golden-mech"), (3072, 192, 96), (3456, 0, 88)),
    (("mla-golden", "ra-mla-golden", "mla-ract", "ra-mla-ract"), (2560, 0, 0), (2560, 0, 0)),
    (("mla-golden-mech", "ra-mla-golden-mech", "full"), (2048, 192, 96), (2304, 0, 88)),
]


@pytest.fixture(scope="module")
def gpt2_sized(tree, full_config):
    resolved = resolve_study(tree, [full_config(MODEL_SIZE_GPT2=True)], RATIO, RATIO.steps)[0]
    return {variant.slug: config for variant, config in resolved}


@pytest.mark.parametrize(("slugs", "first", "last"), WIDTHS)
def test_widths_at_768_are_the_closed_forms(gpt2_sized, slugs, first, last):
    for slug in slugs:
        model = gpt2_sized[slug].model
        sites = model.sites()
        for site, expected in ((sites[0], first), (sites[-1], last)):
            size = model.mlp.size(site)
            widths = (size.widths.get(name, 0) for name in ("mlp_attn_gate", "mlp_cross_token"))
            assert (size.hidden, *widths) == expected, slug


def test_the_baseline_is_gpt2(gpt2_sized):
    # 50304 C + 1024 C + 12 (12 C² + 13 C) + 2 C at C = 768.
    assert gpt2_sized["baseline"].model.num_params() == 124_475_904


def _study(*steps: Step) -> Study:
    return Study("demo", (Step("baseline", ""), *steps))


def test_a_setting_that_the_baseline_has_is_no_step(tree, full_config):
    study = _study(Step("b", "", "baseline", {"MLP_HIDDEN": 0}))
    error = error_of(resolve_study, tree, [full_config()], study, study.steps)
    assert error.codes == ["study.duplicate-step"]
    assert all(label in str(error) for label in ("step demo/01-b", "demo/00-baseline"))


def test_all_defects_of_a_study_are_listed_at_once(tree, full_config):
    study = _study(
        Step("b", "", "baseline", {"NO_SUCH": True}), Step("c", "", "baseline", {"N_LAYER": 999})
    )
    error = error_of(resolve_study, tree, [full_config()], study, study.steps)
    assert "demo/01-b" in str(error) and "demo/02-c" in str(error)


def test_a_defect_of_the_base_is_listed_once(tree, full_config):
    bad = ConfigLayer.of("command line", "SET", {"DROPOUT": "2"})
    error = error_of(resolve_study, tree, [full_config(), bad], RATIO, RATIO.steps)
    assert len(error.problems) == 1
    assert str(error.problems[0]).startswith("SET: DROPOUT")
