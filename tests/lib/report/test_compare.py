"""Comparison of two runs: the first difference, and the losses of runs that may differ."""

import json

import pytest

from lib.errors import ConfigError
from lib.report.compare import (
    compare_bitwise,
    compare_runs,
    comparison_shown,
    comparison_to_text,
    new_comparison,
)
from lib.runs.record import RunRecord
from tests.lib.fabricated import DOCUMENTS, IDENTITY, MANIFEST, changed, write_run

EVAL = '{"kind":"eval","iteration":1,"tokens":8,"val_loss":3.3,"sparsity":0.0}\n'
TRAIN = '{"kind":"train","iteration":3,"tokens":3,"loss":3.0,"lr":0.1,"grad_norm":1.0}\n'


def bitwise(a, b):
    """Return the comparison, and the line of the first difference, or of what is the same."""
    found = compare_bitwise(RunRecord(a), RunRecord(b))
    return found, comparison_to_text(new_comparison(a, b, "", **found)).splitlines()[3].strip()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            {"losses": (3.5, 3.25), "weight": 0.25},
            "metrics.jsonl, iteration 2: loss 3.2 and 3.25, A - B = -0.05",
        ),
        (
            {"documents": {**DOCUMENTS, "y": (29.0, 7, 10)}, "weight": 0.25},
            "per_query.csv, document y: n_correct 6 and 7",
        ),
        (
            {"weight": 0.75},
            "model.safetensors, tensors: wte.weight 'float32 [2, 3], 9ba54d576563' and "
            "'float32 [2, 3], ab8a124d885f'",
        ),
        ({"final": {"sparsity": 0.1}}, "summary.json, final: sparsity 0.0 and 0.1, A - B = -0.1"),
        (
            {"manifest": changed(MANIFEST, init_weights_digest=["i2"]), "losses": (9.0, 9.0)},
            "manifest.json, before step 1: initial weights 'i1' and 'i2'",
        ),
    ],
    ids=["a loss", "a document", "a weight", "the summary", "the initial weights"],
)
def test_the_first_difference_is_reported(tmp_path, other, expected):
    _, text = bitwise(write_run(tmp_path / "a"), write_run(tmp_path / "b", **other))
    assert text == f"first      {expected}"


def test_signs_of_zero_and_a_row_too_many_differ_and_a_file_too_few_is_damage(tmp_path):
    a, b = write_run(tmp_path / "a", weight=0.0), write_run(tmp_path / "b", weight=-0.0)
    assert "model.safetensors, tensors: wte.weight " in bitwise(a, b)[1]
    a = write_run(tmp_path / "a", weight=-0.0)
    b.metrics.write_text(b.metrics.read_text() + TRAIN)
    first = bitwise(a, b)[0]["first"]
    assert (first["place"], first["field"]) == ("iteration 3", "train row")
    b.weights.unlink()
    with pytest.raises(ConfigError) as caught:
        bitwise(a, b)
    assert caught.value.codes == ["run.damaged"]


@pytest.fixture
def logged(tmp_path):
    """Return a factory of runs with rows before their own, as their settings ask for."""

    def write(name, rows, **symbols):
        run = write_run(tmp_path / name, symbols=symbols)
        run.metrics.write_text(rows + run.metrics.read_text())
        return run

    return write


def test_evaluations_at_another_interval_are_left_out_and_counted(logged):
    a, b = logged("a", "", EVAL_INTERVAL=500), logged("b", EVAL, EVAL_INTERVAL=1)
    assert bitwise(a, b)[0]["same"]["rows_left_out"] == 1
    # The same row without another interval is one that should not be there.
    assert "first" in bitwise(a, logged("c", EVAL, EVAL_INTERVAL=500))[0]


def test_statistics_of_another_interval_or_text_are_left_out(logged):
    def run(name, interval, rows, value, *iterations):
        row = '{{"kind":"statistics","tokens":8,"iteration":{},"values":{{"a/b":[{}]}}}}\n'
        lines = "".join(row.format(i, value) for i in iterations)
        return logged(name, lines, STATISTICS_INTERVAL=interval, STATISTICS_ROWS=rows)

    a = run("a", 2, 1, 0.5, 2)
    found, text = bitwise(a, run("often", 1, 1, 0.5, 1, 2))
    assert found["same"]["rows_left_out"] == 1 and ", 1 rows " in text
    # Of the same text they are the same, or the runs part there.
    assert bitwise(a, run("other", 1, 1, 0.75, 1, 2))[0]["first"]["place"] == "iteration 2"
    assert "same" in bitwise(a, run("longer", 2, 8, 0.75, 2))[0]


# Runs that may differ in declared fields.

NAMES = {"machine.compile": "COMPILE", "seed": "SEED"}
# Losses of each document after the change.
OTHER = {"x": (30.4, 5, 10), "y": (29.2, 6, 10)}
COMPILED = {"identity": changed(IDENTITY, machine__compile=True), "documents": OTHER}
# Not exactly one knob: the torch version is another one.
BOTH = {**COMPILED, "manifest": changed(MANIFEST, origin__torch="2.12.0")}
COMPILE, TORCH = "COMPILE: False, True", "torch: 2.13.0, 2.12.0"


@pytest.fixture
def judged(tmp_path):
    def find(axis=(), labels=(), **other):
        a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **other)
        return compare_runs(RunRecord(a), RunRecord(b), NAMES, axis, labels)

    return find


@pytest.mark.parametrize(
    ("other", "axis", "labels", "verdict", "fields"),
    [
        ({}, [], [], "BITWISE", ([], [], [])),
        ({"losses": (3.5, 3.25)}, [], [], "DIVERGED", ([], [], [])),
        (COMPILED, [], [], "NOT COMPARABLE", ([COMPILE], [], [])),
        (COMPILED, ["COMPILE"], [], "COMPARED", ([], [COMPILE], [])),
        (BOTH, ["COMPILE"], [], "NOT COMPARABLE", ([TORCH], [], [])),
        (BOTH, ["COMPILE"], ["torch"], "COMPARED", ([], [COMPILE], [TORCH])),
    ],
)
def test_runs_may_differ_in_what_is_declared(judged, other, axis, labels, verdict, fields):
    found = judged(axis, labels, **other)
    assert found["verdict"] == verdict
    code, shown = comparison_shown(found, json=False)
    assert code == {"DIVERGED": 1, "NOT COMPARABLE": 4}.get(verdict, 0)
    assert (found["reasons"], found["axis"], found["labels"]) == fields
    assert (f"  label      {TORCH}\n" in shown) is (labels == ["torch"])
    first = "first      metrics.jsonl, iteration 2: loss 3.2 and 3.25"
    assert (first in shown) is (verdict == "DIVERGED")
    if verdict == "COMPARED":
        assert found["losses"]["a_minus_b"] == pytest.approx(0.8 / 20)
    else:
        assert found["losses"] is None


def test_a_field_that_nobody_has_is_an_error(judged):
    with pytest.raises(ConfigError) as caught:
        judged(axis=["WEATHER"])
    assert caught.value.codes == ["usage.unknown-field"]
    assert caught.value.problems[0].where == "AXIS" and "'WEATHER'" in str(caught.value)


def test_losses_on_other_documents_are_not_subtracted(judged):
    found = judged(labels=["documents"], documents={"z": (31.4, 5, 10)})
    assert found["verdict"] == "COMPARED" and found["losses"] is None
    assert "  losses     not comparable" in comparison_to_text(found)


def test_one_training_each_has_a_paired_difference_and_no_p(judged):
    """A sign test over documents would give a small p for two seeds of one configuration."""
    found = judged(["SEED"], identity=changed(IDENTITY, seed=2), documents=OTHER)
    document = json.loads(comparison_shown(found, json=True)[1])
    # +0.1 and -0.02 nats per token.
    assert document["schema_version"] == 4 and document["losses"] == {
        "loss_a": pytest.approx(3.02),
        "loss_b": pytest.approx(2.98),
        "a_minus_b": pytest.approx(0.04),
        "documents": 2,
        "mean_a_minus_b": pytest.approx(0.04),
        "sd": pytest.approx(0.12 / 2**0.5),
        "a_better": 1,
        "equal": 0,
    }
    shown = comparison_to_text(found)
    assert "documents  2: mean A - B +0.0400, sd 0.0849; A better on 1 (50%), equal on 0\n" in shown
    assert "loss       A - B = +0.0400 nats per token (A 3.0200, B 2.9800)\n" in shown
    assert "one training each: this does not show an effect" in shown and "make verdicts" in shown
    assert "p=" not in shown and "sign test" not in shown
