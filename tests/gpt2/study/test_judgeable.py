"""Studies that no comparison can judge are refused when they are planned, with step and symbol."""

import pytest

from gpt2.check.cases import plan_cases
from gpt2.records.files import identity_symbols
from gpt2.study.plan import config_layers, declared_verdicts, make_plan, table_plan
from gpt2.study.power import study_power
from lib.report.contrasts import contrasts_of
from tests.errors import error_of

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
BITS = 'unit = "bits-per-byte"'
EDU = {"DATASET_FINEWEBEDU": True}
OWN = {"DATASET_CUSTOM": True, "CUSTOM_PATH": "a"}
HELD_OUT = {**OWN, "CUSTOM_VAL_PATH": "v"}
DOCUMENTS = {**OWN, "EVAL_DOCUMENTS": 3}
IN_BITS = {**DOCUMENTS, "VERDICT_UNIT_BITS_PER_BYTE": True}
# Configuration, keys of the study, changes of the step, and the symbol and reason of the refusal.
REFUSED = [
    ({}, "", "EVAL_TOKENS = 1024", "EVAL_TOKENS", "part of the held-out text"),
    ({}, "", "BLOCK_SIZE = 64", "BLOCK_SIZE", "windows"),
    ({}, "", "TOKENIZER_GPT2 = true", "TOKENIZER", "tokens"),
    ({}, "", 'VAL_FRACTION = "0.2"', "VAL_FRACTION", "documents"),
    (EDU, "", "DATASET_STAND_IN = true", "DATASET", "documents"),
    (HELD_OUT, "", 'CUSTOM_VAL_PATH = "w"', "CUSTOM_VAL_PATH", "documents"),
    # In nats per token; the file of the study comes first.
    (DOCUMENTS, "", "TOKENIZER_GPT2 = true", "TOKENIZER", "tokens"),
    (IN_BITS, 'unit = "nats"', "TOKENIZER_GPT2 = true", "TOKENIZER", "tokens"),
    # The budget is in tokens, and so is the size of a streamed data set.
    (OWN, BITS, "TOKENIZER_GPT2 = true", "TOKENIZER", "tokens"),
    ({**EDU, "EVAL_DOCUMENTS": 3}, BITS, "TOKENIZER_GPT2 = true", "TOKENIZER", "tokens"),
    (DOCUMENTS, BITS, 'CUSTOM_PATH = "b"', "CUSTOM_PATH", "documents"),
]
PLANNED = [
    ({}, "", "RECIPROCAL = true"),
    (HELD_OUT, "", 'CUSTOM_PATH = "b"'),
    # Two tokenizers in bits per byte of whole documents.
    (DOCUMENTS, BITS, "TOKENIZER_GPT2 = true"),
    (IN_BITS, "", "TOKENIZER_GPT2 = true"),
    # The same tokens are predicted, in other windows.
    ({"EVAL_DOCUMENTS": 3}, "", "BLOCK_SIZE = 64"),
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


@pytest.mark.parametrize(("settings", "keys", "changes", "symbol", "reason"), REFUSED)
def test_a_step_that_predicts_another_text_is_refused(
    study, settings, keys, changes, symbol, reason
):
    build = study(changes, keys=keys, **settings)
    (problem,) = error_of(planned_study, build).problems
    assert problem.code == "study.not-judgeable"
    assert problem.what.startswith(f"{symbol}: ") and reason in problem.what
    assert "step texts/01-changed" in problem.where and "study.toml" in problem.where
    assert "judge = false" in problem.next
    assert ("bits-per-byte" in problem.next) == (symbol == "TOKENIZER")
    assert not (build / "results").exists()


@pytest.mark.parametrize(("settings", "keys", "changes"), PLANNED)
def test_a_step_that_changes_only_the_training_is_planned(study, settings, keys, changes):
    plan = planned_study(study(changes, keys=keys, **settings))
    bits = BITS in keys or settings == IN_BITS
    assert plan.unit == ("bits_per_byte" if bits else "nats") and len(plan.runs) == 2


RA = '[[step]]\nname = "ra"\nset.RECIPROCAL = true\n'


def test_only_the_selected_steps_must_be_judgeable(study):
    build = study("EVAL_TOKENS = 1024", RA)
    plan = planned_study(build, "0,ra")
    assert [run.variant.slug for run in plan.runs] == ["baseline", "ra"]
    # Nothing is refused after the training.
    assert table_plan(plan).runs == plan.runs and "EVAL_TOKENS" in plan.left_out[0].what
    for command in (make_plan, plan_cases):
        layers = config_layers(build)
        assert error_of(command, layers, build_dir=build).codes == ["study.not-judgeable"]
    # A step inherits the text of its parent.
    build = study("EVAL_TOKENS = 1024", f'{RA}parent = "changed"\n')
    (problem,) = error_of(planned_study, build, "0,ra").problems
    assert "step texts/02-ra" in problem.where


def test_the_unit_is_part_of_the_rule_if_it_is_not_nats(study):
    rules = []
    for keys in ("", BITS):
        plan = planned_study(study("RECIPROCAL = true", keys=keys))
        rules.append(declared_verdicts(plan).rule_record)
    assert "unit" not in rules[0] and rules[1] == {**rules[0], "unit": "bits_per_byte"}
    # The runs are the same.
    assert "VERDICT_UNIT" not in identity_symbols()


def test_a_study_of_speed_claims_nothing(study):
    build = study("BLOCK_SIZE = 64", keys="judge = false")
    plan = planned_study(build, seeds="1-3")
    # Neither an A/A step nor a detectable effect.
    assert len(plan.runs) == 6 and not plan.judged and study_power(plan) is None
    (problem,) = error_of(planned_study, build, seeds="auto").problems
    assert problem.where == "SEEDS=auto" and "judge = false" in problem.what
    assert len(plan_cases(config_layers(build), build_dir=build).chosen) == 2


def test_a_feature_that_changes_the_text_is_refused(planned):
    (problem,) = error_of(
        planned,
        TEST_MATRIX_MODE=True,
        ABLATION_DESIGN_ADD_ONE_IN=True,
        ABLATION_FEATURES="RECIPROCAL EVAL_TOKENS=1024",
    ).problems
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
