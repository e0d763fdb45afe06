"""Comparison of runs by their configuration symbols."""

import json
import re
from pathlib import Path

import pytest

from gpt2.records.compare import compare, declared_axes, symbol_names
from gpt2.records.files import write_resolved_config
from gpt2.study.arguments import RunLookup
from gpt2.study.plan import Plan, config_layers, make_plan
from gpt2.study.resolve import resolve_config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.runs.identity import flatten_identity
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.integration.conftest import SMALL
from tests.lib.fabricated import MANIFEST, reseal, write_run


@pytest.fixture(scope="module")
def tree():
    return KconfigTree()


@pytest.fixture
def made(tree, tmp_path):
    """A finished run of the small configuration with some symbols changed."""

    def make(name, manifest=MANIFEST, final=None, **settings: SymbolValue):
        config = resolve_config(tree, [ConfigLayer.of("test", "test", {**SMALL, **settings})])
        run = write_run(tmp_path / name, manifest=manifest, final=final)
        write_resolved_config(run, config)
        reseal(run)
        return str(run.path)

    return make


def test_every_setting_has_a_symbol(tree):
    config = resolve_config(
        tree,
        [
            ConfigLayer.of(
                "test",
                "test",
                {**SMALL, "RECIPROCAL": True, "MLP_ATTN_GATE": True, "PRUNING_MAGNITUDE": True},
            )
        ],
    )
    # As stored in a file, where a tuple is a list.
    paths = flatten_identity(json.loads(json.dumps(config.identity())))
    names = symbol_names(config)
    # The vocabulary follows from the tokenizer.
    assert set(paths) - set(names) == {"model.shape.vocab_size"}
    symbols = {symbol.name for symbol in tree.symbols()}
    assert set(names.values()) <= symbols
    assert names["model.attention.terms.reciprocal"] == "RECIPROCAL"
    assert names["pruning"] == "PRUNING" and names["optimizer.beta2"] == "ADAM_BETA2"


@pytest.mark.parametrize(
    ("settings", "symbol"),
    [
        ({"COMPILE": True}, "COMPILE"),
        ({"WEIGHT_DECAY": "0.2"}, "WEIGHT_DECAY"),
        ({"ATTENTION_BACKEND_MATH": True}, "ATTENTION_BACKEND"),
        ({"CPU_THREADS": 2}, "CPU_THREADS"),
        ({"DROPOUT": "0.2"}, "DROPOUT"),
        ({"OPTIMIZER_SGD": True}, "OPTIMIZER"),
        ({"RECIPROCAL": True}, "RECIPROCAL"),
    ],
)
def test_one_knob_is_one_symbol(made, settings, symbol, tmp_path):
    a, b = made("a"), made("b", **settings)
    refused = compare(a, b, tmp_path)
    assert refused["verdict"] == "NOT COMPARABLE"
    assert [re.match(r"\w+", reason)[0] for reason in refused["reasons"]] == [symbol]
    assert compare(a, b, tmp_path, axis=symbol)["verdict"] == "COMPARED"
    assert compare(a, b, tmp_path, label_by=symbol)["labels"] == refused["reasons"]


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


def test_steps_of_a_study_may_differ_in_what_they_set(study, capsys):
    compared = compare("ra", "baseline", study, lookup=RunLookup(seeds="2"))
    assert compared["verdict"] == "COMPARED"
    assert {axis.partition(":")[0] for axis in compared["axis"]} >= {"RECIPROCAL"}
    runs = [str(path) for path in sorted((study / "results/ratio").glob("*-s[12]-*"))]
    # Other seeds are a difference that no step declares.
    refused = compare(runs[0], runs[3], study)
    assert [reason.partition(":")[0] for reason in refused["reasons"]] == ["SEED"]
    # Also if a symbol was added since.
    file = f"{runs[0]}/resolved_config.yaml"
    with open(file) as stream:
        record = json.load(stream)
    del record["symbols"]["JOBS"]
    with open(file, "w") as stream:
        json.dump(record, stream)
    reseal(RunDir(Path(runs[0])))
    assert compare(runs[0], runs[2], study)["verdict"] == "COMPARED"
    assert "NOTE" not in capsys.readouterr().err
    # Without the configuration of the study, nothing is declared.
    assert compare(runs[0], runs[2], study / "elsewhere")["verdict"] == "NOT COMPARABLE"
    assert "NOTE    ratio is not the study of .config" in capsys.readouterr().err


def test_settings_on_top_select_other_runs(study):
    settings = (ConfigLayer.of("command line", "SET", {"LEARNING_RATE": "1e-2"}),)
    with pytest.raises(ConfigError) as caught:
        compare("ra", "baseline", study, lookup=RunLookup(seeds="2", settings=settings))
    assert caught.value.codes == ["run.not-found"]


def test_accumulation_follows_from_the_number_of_gpus(made, tmp_path):
    a = made("a", GLOBAL_BATCH=8, BATCH_SIZE=2, GRAD_ACCUMULATION=4)
    b = made("b", GLOBAL_BATCH=8, BATCH_SIZE=2, GRAD_ACCUMULATION=2, GPUS=2)
    refused = compare(a, b, tmp_path)
    assert [reason.partition(":")[0] for reason in refused["reasons"]] == ["GPUS"]
    c = made("c", GLOBAL_BATCH=4, BATCH_SIZE=2, GRAD_ACCUMULATION=2)
    refused = compare(a, c, tmp_path)
    assert {reason.partition(":")[0] for reason in refused["reasons"]} == {
        "GLOBAL_BATCH",
        "GRAD_ACCUMULATION",
    }


def test_a_second_knob_is_not_overlooked(made, tmp_path):
    a, b = made("a"), made("b", COMPILE=True, DROPOUT="0.2")
    refused = compare(a, b, tmp_path, axis="COMPILE")
    assert refused["reasons"] == ["DROPOUT: 0.1, 0.2"]


def test_runs_of_code_that_is_gone_are_compared_by_paths(made, tmp_path):
    a, b = made("a"), made("b", DROPOUT="0.2")
    for path in (a, b):
        file = f"{path}/resolved_config.yaml"
        with open(file) as stream:
            record = json.load(stream)
        del record["symbols"]["N_LAYER"]
        with open(file, "w") as stream:
            json.dump(record, stream)
        reseal(RunDir(Path(path)))
    assert compare(a, b, tmp_path)["reasons"] == ["model.shape.dropout: 0.1, 0.2"]


def test_both_runs_are_required(made, tmp_path):
    with pytest.raises(ConfigError) as caught:
        compare(made("a"), "", tmp_path)
    assert caught.value.codes == ["usage.missing-argument"]
    assert caught.value.problems[0].where == "B"


def test_a_run_that_does_not_exist_is_reported_by_its_variable(made, tmp_path):
    folder = write_build(tmp_path / "build", SMALL)
    with pytest.raises(ConfigError) as caught:
        compare(made("a"), "no-such-run", folder)
    assert caught.value.codes == ["run.not-found"]
    assert caught.value.problems[0].where == "B"


def test_an_unknown_axis_is_an_error(made, tmp_path):
    runs = [RunRecord(RunDir(Path(made("a"))))]
    plan = Plan("single", tmp_path, tmp_path, None, [])
    with pytest.raises(ConfigError) as caught:
        declared_axes(plan, runs, "DROPOUT,DROPUOT")
    assert caught.value.codes == ["usage.unknown-field"]
    assert caught.value.problems[0].where == "AXIS"
    assert declared_axes(plan, runs, "DROPOUT") == {runs[0].run.path: {"DROPOUT"}}
