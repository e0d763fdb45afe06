"""Studies that no comparison can judge are refused when they are planned, with step and symbol."""

import pytest

from gpt2.check.cases import plan_cases
from gpt2.records.files import identity_symbols
from gpt2.study.looks import verdict_plan
from gpt2.study.plan import config_layers, make_plan, planned_looks, table_plan
from gpt2.study.power import study_power
from lib.errors import ConfigError
from lib.report.contrasts import contrasts_of

STUDY = """\
name = "texts"
{keys}
[[step]]
name = "baseline"

[[step]]
name = "changed"
set = {{ {changes} }}
params = [-0.99, 99]
{more}"""
# Configuration, changes of the step, and the symbol and reason of the refusal.
REFUSED = [
    ({}, "EVAL_TOKENS = 1024", "EVAL_TOKENS", "part of the held-out text"),
    ({}, "BLOCK_SIZE = 64", "BLOCK_SIZE", "windows"),
    ({}, "TOKENIZER_GPT2 = true", "TOKENIZER", "tokens"),
    ({}, 'VAL_FRACTION = "0.2"', "VAL_FRACTION", "documents"),
    ({}, "DATASET_SHAKESPEARE = true", "DATASET", "documents"),
    (
        {"DATASET_FINEWEBEDU": True},
        "DATASET_STAND_IN = true",
        "DATASET",
        "documents",
    ),
    ({"DATASET_FINEWEBEDU": True}, "DATASET_TOKENS = 1000", "DATASET_TOKENS", "documents"),
    (
        {"DATASET_CUSTOM": True, "CUSTOM_PATH": "a"},
        'CUSTOM_PATH = "b"',
        "CUSTOM_PATH",
        "documents",
    ),
    (
        {"DATASET_CUSTOM": True, "CUSTOM_PATH": "a", "CUSTOM_VAL_PATH": "v"},
        'CUSTOM_VAL_PATH = "w"',
        "CUSTOM_VAL_PATH",
        "documents",
    ),
]


@pytest.fixture
def study(configure):
    """Return a function that writes a study and its configuration, and returns the build folder."""

    def write(changes, more="", keys="", **settings):
        build = configure(RA_MLA_ABLATION_MODE=True, ABLATION_STUDY_OWN=True, **settings)
        text = STUDY.format(changes=changes, more=more, keys=keys)
        (build / "study.toml").write_text(text)
        return build

    return write


def planned_study(build, steps="", seeds=""):
    return make_plan(config_layers(build), build, steps=steps, seeds=seeds)


@pytest.mark.parametrize(("settings", "changes", "symbol", "reason"), REFUSED)
def test_a_step_that_predicts_another_text_is_refused(study, settings, changes, symbol, reason):
    build = study(changes, **settings)
    for refused in (
        lambda: planned_study(build),
        lambda: plan_cases(config_layers(build), build_dir=build),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        (problem,) = caught.value.problems
        assert problem.code == "study.not-judgeable"
        assert problem.what.startswith(f"{symbol}: ") and reason in problem.what
        assert "step texts/01-changed" in problem.where and "study.toml" in problem.where
        assert "judge = false" in problem.next
    assert not (build / "results").exists()


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, "RECIPROCAL = true"),
        (
            {"DATASET_CUSTOM": True, "CUSTOM_PATH": "a", "CUSTOM_VAL_PATH": "v"},
            'CUSTOM_PATH = "b"',
        ),
        ({}, "EVAL_INTERVAL = 5\nset.RECIPROCAL = true".replace("\nset.", ", ")),
    ],
)
def test_a_step_that_changes_only_the_training_is_planned(study, settings, changes):
    build = study(changes, **settings)
    assert len(planned_study(build).runs) == 2
    assert len(plan_cases(config_layers(build), build_dir=build).chosen) == 2


def test_only_the_selected_steps_must_be_judgeable(study):
    more = '[[step]]\nname = "ra"\nset.RECIPROCAL = true\n'
    build = study("EVAL_TOKENS = 1024", more)
    assert [run.variant.slug for run in planned_study(build, "0,ra").runs] == ["baseline", "ra"]
    with pytest.raises(ConfigError):
        planned_study(build, "0,1")


BITS = 'unit = "bits-per-byte"'
CUSTOM = {"DATASET_CUSTOM": True, "CUSTOM_PATH": "a", "EVAL_DOCUMENTS": 3}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [(CUSTOM, BITS), ({**CUSTOM, "VERDICT_UNIT_BITS_PER_BYTE": True}, "")],
)
def test_two_tokenizers_are_judged_in_bits_per_byte_of_whole_documents(study, settings, keys):
    build = study("TOKENIZER_GPT2 = true", keys=keys, **settings)
    plan = planned_study(build)
    assert plan.unit == "bits_per_byte" and len(plan.runs) == 2
    assert len(plan_cases(config_layers(build), build_dir=build).chosen) == 2


@pytest.mark.parametrize(
    ("settings", "keys", "symbol"),
    [
        # In nats per token.
        (CUSTOM, "", "TOKENIZER"),
        # The file of the study comes first.
        ({**CUSTOM, "VERDICT_UNIT_BITS_PER_BYTE": True}, 'unit = "nats"', "TOKENIZER"),
        # The budget is in tokens.
        ({**CUSTOM, "EVAL_DOCUMENTS": 0}, BITS, "TOKENIZER"),
        # So is the size of a streamed data set.
        ({"DATASET_FINEWEBEDU": True, "EVAL_DOCUMENTS": 3}, BITS, "TOKENIZER"),
    ],
)
def test_two_tokenizers_on_other_bytes_are_refused(study, settings, keys, symbol):
    with pytest.raises(ConfigError) as caught:
        planned_study(study("TOKENIZER_GPT2 = true", keys=keys, **settings))
    (problem,) = caught.value.problems
    assert problem.what.startswith(f"{symbol}: ")
    assert "bits-per-byte" in problem.next and "EVAL_DOCUMENTS" in problem.next


@pytest.mark.parametrize(
    ("changes", "symbol"),
    [("EVAL_DOCUMENTS = 2", "EVAL_DOCUMENTS"), ('CUSTOM_PATH = "b"', "CUSTOM_PATH")],
)
def test_other_bytes_are_refused_in_bits_per_byte(study, changes, symbol):
    with pytest.raises(ConfigError) as caught:
        planned_study(study(changes, keys=BITS, **CUSTOM))
    assert caught.value.problems[0].what.startswith(f"{symbol}: ")


def test_contexts_are_judged_on_whole_documents(study):
    """The same tokens are predicted, in other windows."""
    assert len(planned_study(study("BLOCK_SIZE = 64", EVAL_DOCUMENTS=3)).runs) == 2


def test_an_unknown_unit_is_refused(study):
    with pytest.raises(ConfigError) as caught:
        planned_study(study("RECIPROCAL = true", keys='unit = "bits"'))
    assert caught.value.codes == ["study.invalid-value"]


def test_the_unit_is_part_of_the_rule_if_it_is_not_nats(study):
    rules = []
    for keys in ("", BITS):
        plan = planned_study(study("RECIPROCAL = true", keys=keys))
        rules.append(verdict_plan(plan.base, planned_looks(plan), unit=plan.unit).rule_record)
    assert "unit" not in rules[0] and rules[1] == {**rules[0], "unit": "bits_per_byte"}
    # The runs are the same.
    assert "VERDICT_UNIT" not in identity_symbols()


def test_a_step_that_inherits_another_text_is_refused(study):
    more = '[[step]]\nname = "ra"\nparent = "changed"\nset.RECIPROCAL = true\n'
    with pytest.raises(ConfigError) as caught:
        planned_study(study("EVAL_TOKENS = 1024", more), "0,ra")
    (problem,) = caught.value.problems
    assert "step texts/02-ra" in problem.where


def test_the_table_of_selected_steps_is_not_refused(study):
    """Nothing is refused after the training."""
    build = study("EVAL_TOKENS = 1024", '[[step]]\nname = "ra"\nset.RECIPROCAL = true\n')
    plan = planned_study(build, "0,ra")
    assert table_plan(plan).runs == plan.runs
    assert "EVAL_TOKENS" in plan.left_out[0].what


def test_a_study_of_speed_claims_nothing(study):
    build = study("BLOCK_SIZE = 64", keys="judge = false")
    plan = planned_study(build, seeds="1-3")
    # Neither an A/A step nor a detectable effect.
    assert len(plan.runs) == 6 and not plan.judged and study_power(plan) is None
    with pytest.raises(ConfigError) as caught:
        planned_study(build, seeds="auto")
    (problem,) = caught.value.problems
    assert problem.where == "SEEDS=auto" and "judge = false" in problem.what
    assert len(plan_cases(config_layers(build), build_dir=build).chosen) == 2


@pytest.mark.parametrize("value", ['"no"', "0"])
def test_judge_is_true_or_false(study, value):
    with pytest.raises(ConfigError) as caught:
        planned_study(study("RECIPROCAL = true", keys=f"judge = {value}"))
    assert caught.value.codes == ["study.invalid-value"]
    assert "true or false" in caught.value.problems[0].what


def test_a_feature_that_changes_the_text_is_refused(planned):
    with pytest.raises(ConfigError) as caught:
        planned(
            TEST_MATRIX_MODE=True,
            ABLATION_DESIGN_ADD_ONE_IN=True,
            ABLATION_FEATURES="RECIPROCAL EVAL_TOKENS=1024",
        )
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("study.not-judgeable", "ABLATION_FEATURES eval-tokens")


def test_a_sweep_over_contexts_is_planned(planned):
    plan = planned(sweep="BLOCK_SIZE=64,128 DROPOUT=0,0.1")
    texts = [run.variant.text for run in plan.runs]
    assert texts == ["BLOCK_SIZE=64"] * 2 + ["BLOCK_SIZE=128"] * 2
    names = [contrast.name for contrast in contrasts_of(plan.variants, "both")]
    assert names == [
        "block-size-64-dropout-0.1 vs block-size-64-dropout-0",
        "block-size-128-dropout-0.1 vs block-size-128-dropout-0",
    ]
    # A sweep without such an axis has one baseline.
    plan = planned(sweep="DROPOUT=0,0.1")
    assert {run.variant.text for run in plan.runs} == {""}
