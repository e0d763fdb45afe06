"""I5, for every study: steps are unique, within their declared size, and change their symbols."""

import pytest

from gpt2.study.resolve import resolve_study
from gpt2.study.step import Step, Study
from gpt2.study.study_file import OWN, RATIO, STUDIES
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.project import ROOT
from tests.errors import error_of

every_study = pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)

SMALL = {"MODEL_SIZE_CUSTOM": True, "N_LAYER": 4, "N_HEAD": 4, "N_EMBD": 96, "TOKENIZER_BYTE": True}
SIZES = [
    *((study, size) for study in STUDIES.values() for size in ({"MODEL_SIZE_GPT2": True}, SMALL)),
    # Of 25 heads, which the key heads of other studies do not divide.
    *((STUDIES[name], {"MODEL_SIZE_XL": True}) for name in ("ratio", "nsa")),
]

# What the steps of a study share.
SHARED = {
    "nsa": {"ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 2, "BLOCK_SIZE": 1024},
    "modern": dict(STUDIES["parts"].steps[-1].set),
}


def chosen(study):
    settings = {f"ABLATION_STUDY_{study.name.upper()}": True, **SHARED.get(study.name, {})}
    return ConfigLayer.of("command line", "test", settings)


@pytest.fixture(scope="module")
def quickstart(tree):
    """The steps of a study at the quick start's size."""

    def resolve(study):
        layers = [*defconfig_layers(ROOT, "gpt2-ratio-small"), chosen(study)]
        block = resolve_study(tree, layers, study, study.steps)[0]
        return {variant.slug: config for variant, config in block}

    return resolve


def test_the_studies_are_the_members_of_the_choice(tree):
    members = {member.name for member in tree.kconf.named_choices["ABLATION_STUDY"].syms}
    assert members == {f"ABLATION_STUDY_{name.upper()}" for name in (*STUDIES, OWN)}


@pytest.mark.parametrize(("study", "size"), SIZES)
def test_i5_every_step_is_unique_and_within_its_declared_size(tree, full_config, study, size):
    """Resolving refuses others."""
    layers = [full_config(**size), chosen(study)]
    if "MODEL_SIZE_XL" in size and study.name == "nsa":
        layers.append(ConfigLayer.of("command line", "heads that divide 25", {"N_KV_HEAD": 5}))
    resolved = resolve_study(tree, layers, study, study.steps)[0]
    assert len({config.hash8 for _, config in resolved}) == len(study.steps)


@every_study
def test_a_step_changes_what_it_says_and_what_comes_and_goes_with_it(tree, quickstart, study):
    members = {m.name: choice.name for choice in tree.kconf.unique_choices for m in choice.syms}
    steps = quickstart(study)
    for step in study.steps[1:]:
        before, after = (steps[slug].values for slug in (step.parent, step.slug))
        changed = {name for name in before if before[name] != after[name]}
        said = {members.get(name, name) for name in step.set}
        assert changed & said, step.slug
        # A symbol that is not available has no value: 0, "" or no.
        assert all(not before[name] or not after[name] for name in changed - said), step.slug


def test_all_steps_of_nsa_have_the_key_heads_and_the_context_of_the_control(quickstart):
    steps = {slug: config.model for slug, config in quickstart(STUDIES["nsa"]).items()}
    assert len({(m.attention.projection, m.shape) for m in steps.values()}) == 1
    assert steps["baseline"].attention.pattern.name == "full"
    # The window is as wide as the most that a token reads.
    nsa, window = (steps[slug].attention.pattern for slug in ("nsa", "sliding"))
    reads = [sum(nsa.pairs(t + 1)) - sum(nsa.pairs(t)) for t in range(1024)]
    assert max(reads) == reads[-1] == window.window == 511


# Hidden units, gate and mix widths of the first block at C = 768, then of the last, which has no next
# block to gate. Computed by hand: attention has 4C² weights, latent attention 2C² + 4CR; r of that is
# shared as the study declares, and rounded to 64 and 8.
WIDTHS = {
    "golden": [(3840, 0, 0), (3840, 0, 0)],
    "golden-gate": [(3264, 272, 0), (3840, 0, 0)],
    "golden-gate-cross": [(3072, 192, 96), (3456, 0, 88)],
    "mla-golden-mech": [(2048, 192, 96), (2304, 0, 88)],
}


def test_widths_at_768_are_the_closed_forms(tree, full_config):
    layers = [full_config(MODEL_SIZE_GPT2=True)]
    resolved = resolve_study(tree, layers, RATIO, RATIO.steps)[0]
    models = {variant.slug: config.model for variant, config in resolved}
    for slug, expected in WIDTHS.items():
        sites = models[slug].sites()
        sizes = [models[slug].mlp.size(site) for site in (sites[0], sites[-1])]
        names = ("mlp_attn_gate", "mlp_cross_token")
        found = [(size.hidden, *(size.widths.get(name, 0) for name in names)) for size in sizes]
        assert found == expected, slug


def _study(*steps):
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
