"""I5, for every study: steps are unique, within their declared size, and change their symbols."""

import itertools

import pytest

from gpt2.study.resolve import resolve_study
from gpt2.study.step import Study
from gpt2.study.study_file import OWN, STUDIES
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.project import ROOT

every_study = pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)

# Of 25 heads.
XL = {"MODEL_SIZE_XL": True}
SIZES = [
    {"MODEL_SIZE_TINY": True, "TOKENIZER_BYTE": True},
    {"MODEL_SIZE_GPT2": True},
    {"MODEL_SIZE_LARGE": True},
    XL,
    {
        "MODEL_SIZE_CUSTOM": True,
        "N_LAYER": 4,
        "N_HEAD": 4,
        "N_EMBD": 96,
        "TOKENIZER_BYTE": True,
    },
]

# What the steps of a study share.
SHARED = {"nsa": {"ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 2, "BLOCK_SIZE": 1024}}


def chosen(study: Study) -> ConfigLayer:
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


@pytest.mark.parametrize(
    ("size", "study"),
    [
        pytest.param(size, study, id=f"{'-'.join(size)}-{study.name}")
        for size, study in itertools.product(SIZES, STUDIES.values())
        if size != XL or study.name not in ("mechanisms", "quickstart")
    ],
)
def test_i5_every_step_is_unique_and_keeps_its_promises_at_every_size(
    tree, full_config, study, size
):
    layers = [full_config(**size), chosen(study)]
    if size == XL and study.name == "nsa":
        layers.append(ConfigLayer.of("command line", "heads that divide 25", {"N_KV_HEAD": 5}))
    resolved = resolve_study(tree, layers, study, study.steps)[0]
    assert len({config.hash8 for _, config in resolved}) == len(study.steps)
    for model in (config.model for _, config in resolved):
        if model.mlp.sizing == "ratio":
            for site in model.sites():
                assert abs(model.mlp.built_ratio(site) / model.mlp.ratio - 1) <= 0.01


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


def test_steps_of_one_name_are_one_configuration(quickstart):
    ratio, mechanisms = (quickstart(STUDIES[name]) for name in ("ratio", "mechanisms"))
    for slug in ("baseline", "ra", "ract", "mla", "mla-golden", "golden"):
        assert ratio[slug].hash8 == mechanisms[slug].hash8
    # RATIO calls it golden-gate, beside golden-gate-cross.
    assert ratio["golden-gate"].hash8 == mechanisms["gate"].hash8


@pytest.fixture(scope="module")
def steps(tree):
    """The models of the NSA study, by slug."""
    layers = defconfig_layers(ROOT, "nsa-quickstart")
    return {
        variant.slug: config.model
        for variant, config in resolve_study(tree, layers, STUDIES["nsa"], STUDIES["nsa"].steps)[0]
    }


class TestNsa:
    """What makes the steps of the NSA study comparable."""

    def test_all_have_the_key_heads_and_the_context_of_the_control(self, steps):
        shared = {(m.attention.projection, m.shape) for m in steps.values()}
        assert len(shared) == 1
        assert steps["baseline"].attention.pattern.name == "full"

    def test_the_window_is_as_wide_as_the_most_that_a_token_reads(self, steps):
        nsa, window = (steps[slug].attention.pattern for slug in ("nsa", "sliding"))
        reads = [sum(nsa.pairs(t + 1)) - sum(nsa.pairs(t)) for t in range(1024)]
        assert max(reads) == reads[-1] == window.window == 511

    def test_parameters_are_those_worked_out_by_hand(self, steps):
        """C = 128, two key heads of 32 in 4 layers: 2 · 128 · 64 for keys and values of a branch."""
        counts = {slug: model.num_params() for slug, model in steps.items()}
        pair, phi, gate = 4 * (2 * 128 * 64 + 128), 4 * 2 * (16 * 17 * 32 + 16 * 32), 4 * 4 * 129
        added = {slug: count - counts["baseline"] for slug, count in counts.items()}
        assert added == {
            "baseline": 0,
            "sliding": 0,
            "nsa": 2 * pair + phi + 3 * gate,
            "nsa-shared": phi + 3 * gate,
            "nsa-mean": 2 * pair + 3 * gate,
            "nsa-softmax": 2 * pair + phi + 3 * gate,
            "nsa-no-compressed": pair + 2 * gate,
            "nsa-no-selected": pair + phi + 2 * gate,
            "nsa-no-window": pair + phi + 2 * gate,
            "nsa-random": 2 * pair + phi + 3 * gate,
        }
