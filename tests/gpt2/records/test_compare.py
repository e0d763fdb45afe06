"""Comparison of runs by their configuration symbols, and the symbols that a study declares."""

import json
import re
from pathlib import Path

import pytest

from gpt2.records.compare import chosen_runs, compare, declared_axes, symbol_names, whole_study
from gpt2.records.files import write_resolved_config
from gpt2.study.arguments import RunLookup
from gpt2.study.plan import Plan, config_layers, make_plan
from gpt2.study.resolve import resolve_config
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.project import ROOT
from lib.report.run_facts import differing_settings
from lib.runs.identity import flatten_identity
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.integration.conftest import SMALL
from tests.lib.fabricated import reseal, write_run

STUDIES = ["gpt2-ratio-ablation", "gpt2-mechanisms", "test-matrix-optimizers"]


@pytest.fixture(scope="module")
def tree():
    return KconfigTree()


@pytest.fixture
def made(tree, tmp_path):
    """Return a factory of finished runs of the small configuration with some symbols changed."""

    def make(name, **settings):
        config = resolve_config(tree, [ConfigLayer.of("test", "test", {**SMALL, **settings})])
        run = write_run(tmp_path / name)
        write_resolved_config(run, config)
        reseal(run)
        return str(run.path)

    return make


def without_symbol(path, name):
    """Rewrite the record of a run as if this symbol did not exist then."""
    run = RunDir(Path(path))
    record = json.loads(run.resolved_config.read_text())
    del record["symbols"][name]
    run.resolved_config.write_text(json.dumps(record))
    reseal(run)


def fields_of(reasons):
    return {reason.partition(":")[0] for reason in reasons}


def test_every_setting_has_a_symbol(tree):
    parts = {"RECIPROCAL": True, "MLP_ATTN_GATE": True, "PRUNING_MAGNITUDE": True}
    config = resolve_config(tree, [ConfigLayer.of("test", "test", {**SMALL, **parts})])
    # As stored in a file, where a tuple is a list.
    paths = flatten_identity(json.loads(json.dumps(config.identity())))
    names = symbol_names(config)
    # The vocabulary follows from the tokenizer.
    assert set(paths) - set(names) == {"model.shape.vocab_size"}
    assert set(names.values()) <= {symbol.name for symbol in tree.symbols()}
    assert names["model.attention.terms.reciprocal"] == "RECIPROCAL"
    assert names["pruning"] == "PRUNING" and names["optimizer.beta2"] == "ADAM_BETA2"


def test_a_knob_is_a_symbol_and_a_second_one_is_not_overlooked(made, tmp_path):
    a = made("a")
    for symbol, settings in {
        "ATTENTION_BACKEND": {"ATTENTION_BACKEND_MATH": True},
        "OPTIMIZER": {"OPTIMIZER_SGD": True},
        "RECIPROCAL": {"RECIPROCAL": True},
    }.items():
        reasons = compare(a, made("b", **settings), tmp_path)["reasons"]
        assert [re.match(r"\w+", reason)[0] for reason in reasons] == [symbol]
        assert compare(a, made("b", **settings), tmp_path, axis=symbol)["verdict"] == "COMPARED"
    b = made("b", WEIGHT_DECAY="0.2", DROPOUT="0.2")
    assert compare(a, b, tmp_path, axis="WEIGHT_DECAY")["reasons"] == ["DROPOUT: 0.1, 0.2"]
    assert compare(a, b, tmp_path, "DROPOUT", "WEIGHT_DECAY")["verdict"] == "COMPARED"
    # Runs of code that is gone have paths only.
    for path in (a, b):
        without_symbol(path, "N_LAYER")
    paths = {"model.shape.dropout", "optimizer.weight_decay"}
    assert fields_of(compare(a, b, tmp_path)["reasons"]) == paths


def test_accumulation_follows_from_the_number_of_gpus(made, tmp_path):
    a, *others = (
        made(name, BATCH_SIZE=2, GLOBAL_BATCH=whole, GRAD_ACCUMULATION=accumulation, GPUS=gpus)
        for name, whole, accumulation, gpus in (("a", 8, 4, 1), ("b", 8, 2, 2), ("c", 4, 2, 1))
    )
    fields = [fields_of(compare(a, other, tmp_path)["reasons"]) for other in others]
    assert fields == [{"GPUS"}, {"GLOBAL_BATCH", "GRAD_ACCUMULATION"}]


@pytest.fixture
def study(tmp_path):
    """Return a build folder whose study has two finished steps."""
    steps = {"RA_MLA_ABLATION_STEPS": "0,ra", "VERDICT_AA": False}
    write_build(tmp_path, {**SMALL, **steps})
    plan = make_plan(config_layers(tmp_path), tmp_path, seeds="1,2")
    for run in plan.runs:
        directory = write_run(run.path, identity=run.config.identity(), symbols=run.config.values)
        write_resolved_config(directory, run.config)
        reseal(directory)
    return tmp_path


@pytest.mark.slow
def test_steps_of_a_study_may_differ_in_what_they_set(study, capsys):
    compared = compare("ra", "baseline", study, lookup=RunLookup(seeds="2"))
    assert compared["verdict"] == "COMPARED" and "RECIPROCAL" in fields_of(compared["axis"])
    runs = [str(path) for path in sorted((study / "results/ratio").glob("*-s[12]-*"))]
    # Other seeds are a difference that no step declares.
    assert fields_of(compare(runs[0], runs[3], study)["reasons"]) == {"SEED"}
    # Also if a symbol was added since.
    without_symbol(runs[0], "JOBS")
    assert compare(runs[0], runs[2], study)["verdict"] == "COMPARED"
    assert "NOTE" not in capsys.readouterr().err
    # Without the configuration of the study, nothing is declared.
    assert compare(runs[0], runs[2], study / "elsewhere")["verdict"] == "NOT COMPARABLE"
    assert "NOTE    ratio is not the study of .config" in capsys.readouterr().err
    # Settings on top select other runs.
    settings = (ConfigLayer.of("command line", "SET", {"LEARNING_RATE": "1e-2"}),)
    with pytest.raises(ConfigError) as caught:
        compare("ra", "baseline", study, lookup=RunLookup(seeds="2", settings=settings))
    assert caught.value.codes == ["run.not-found"]


def test_what_does_not_exist_is_reported_by_its_variable(made, tmp_path):
    folder, a = write_build(tmp_path / "build", SMALL), made("a")
    for b, code in (("", "usage.missing-argument"), ("no-such-run", "run.not-found")):
        with pytest.raises(ConfigError) as caught:
            compare(a, b, folder)
        assert caught.value.codes == [code] and caught.value.problems[0].where == "B"
    plan = Plan("single", tmp_path, tmp_path, None, [])
    runs = [RunRecord(RunDir(Path(a)))]
    with pytest.raises(ConfigError) as caught:
        declared_axes(plan, runs, "DROPOUT,DROPUOT")
    assert caught.value.codes == ["usage.unknown-field"]
    assert caught.value.problems[0].where == "AXIS"
    assert declared_axes(plan, runs, "DROPOUT") == {runs[0].run.path: {"DROPOUT"}}


@pytest.mark.parametrize(
    ("named", "code"),
    [("", "run.not-finished"), ("none", "run.not-found"), ("ra", "run.not-found")],
)
def test_a_name_without_a_finished_run_is_an_error(tmp_path, named, code):
    plan = make_plan(defconfig_layers(ROOT, "gpt2-ratio-small"), tmp_path, steps="0,5")
    with pytest.raises(ConfigError) as caught:
        chosen_runs(plan, plan, named)
    assert caught.value.codes == [code] and (named or "ratio") in str(caught.value)


# What a study declares.


@pytest.mark.parametrize("name", STUDIES)
def test_the_steps_of_a_study_differ_in_what_they_declare(name, tmp_path):
    study = whole_study(make_plan(defconfig_layers(ROOT, name), tmp_path))
    axes = declared_axes(study, [RunRecord(RunDir(run.path)) for run in study.runs], "")
    assert len(study.runs) > 2
    first = study.runs[0]
    for run in study.runs[1:]:
        names = symbol_names(first.config) | symbol_names(run.config)
        settings = (flatten_identity(each.config.identity()) for each in (first, run))
        found = {names[path] for path in differing_settings(*settings)}
        assert found and found <= axes[first.path] | axes[run.path], run.label
    if name == STUDIES[0]:
        # What the steps below it change; a choice, not the member that the step sets.
        last = next(axes[run.path] for run in study.runs if run.variant.number == 7)
        assert {"RECIPROCAL", "MLP_SIZING", "MLP_ATTN_GATE", "MLP_CROSS_TOKEN"} <= last
        assert not last & {"MLP_SIZING_RATIO", "BATCH_SIZE", "COMPILE", "LEARNING_RATE"}
