"""Comparison of two runs: the first difference, and the losses of runs that may differ."""

import json
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.report.compare import (
    EXIT_CODES,
    compare_bitwise,
    compare_document_losses,
    compare_runs,
    comparison_to_json,
    comparison_to_text,
    new_comparison,
)
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import DOCUMENTS, IDENTITY, MANIFEST, changed, write_run

EVAL = '{"kind":"eval","iteration":1,"tokens":8,"val_loss":3.3,"sparsity":0.0}\n'
TRAIN = '{"kind":"train","iteration":3,"tokens":3,"loss":3.0,"lr":0.1,"grad_norm":1.0}\n'


def compare(a, b):
    return compare_bitwise(RunRecord(a), RunRecord(b))


def text(found):
    """Return the line of the first difference, or of what is the same."""
    a = RunDir(Path("a"))
    return comparison_to_text(new_comparison(a, a, "", **found)).splitlines()[3].strip()


@pytest.fixture
def compared(tmp_path):
    def compare_with(**other):
        return compare(write_run(tmp_path / "a"), write_run(tmp_path / "b", **other))

    return compare_with


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            {"losses": (3.5, 3.25), "weight": 0.25},
            "metrics.jsonl, iteration 2: loss 3.2 and 3.25, A - B = -0.05",
        ),
        (
            {"documents": {"x": (31.4, 5, 10), "y": (29.0, 7, 10)}, "weight": 0.25},
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
def test_the_first_difference_is_reported(compared, other, expected):
    found = compared(**other)
    assert text(found) == f"first      {expected}"


def test_weights_that_are_equal_but_not_the_same_bits(tmp_path):
    a, b = write_run(tmp_path / "a", weight=0.0), write_run(tmp_path / "b", weight=-0.0)
    found = compare(a, b)
    assert "model.safetensors, tensors: wte.weight " in text(found)


def test_a_row_too_many_is_a_divergence(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    b.metrics.write_text(b.metrics.read_text() + TRAIN)
    found = compare(a, b)
    assert (found["first"]["place"], found["first"]["field"]) == ("iteration 3", "train row")


def test_evaluations_at_another_interval_are_left_out_and_counted(tmp_path):
    a = write_run(tmp_path / "a", symbols={"EVAL_INTERVAL": 500})
    b = write_run(tmp_path / "b", symbols={"EVAL_INTERVAL": 1})
    b.metrics.write_text(EVAL + b.metrics.read_text())
    found = compare(a, b)
    assert found["same"]["rows_left_out"] == 1
    # The same row without another interval is one that should not be there.
    c = write_run(tmp_path / "c", symbols={"EVAL_INTERVAL": 500})
    c.metrics.write_text(b.metrics.read_text())
    assert "first" in compare(a, c)


def test_missing_files_are_the_users_error(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    b.weights.unlink()
    with pytest.raises(ConfigError) as caught:
        compare(a, b)
    assert caught.value.codes == ["run.damaged"]


def test_statistics_of_another_interval_or_text_are_left_out(tmp_path):
    def write(name, interval, rows, value, iterations):
        run = write_run(
            tmp_path / name, symbols={"STATISTICS_INTERVAL": interval, "STATISTICS_ROWS": rows}
        )
        row = '{{"kind":"statistics","tokens":8,"iteration":{},"values":{{"a/b":[{}]}}}}\n'
        lines = "".join(row.format(i, value) for i in iterations)
        run.metrics.write_text(lines + run.metrics.read_text())
        return run

    a, often = write("a", 2, 1, 0.5, [2]), write("often", 1, 1, 0.5, [1, 2])
    found = compare(a, often)
    assert found["same"]["rows_left_out"] == 1
    assert text(found).count(", ") == 3 and ", 1 rows " in text(found)
    # Of the same text they are the same, or the runs part there.
    other = write("other", 1, 1, 0.75, [1, 2])
    found = compare(a, other)
    assert found["first"]["place"] == "iteration 2"
    longer = write("longer", 2, 8, 0.75, [2])
    assert "same" in compare(a, longer)


# Runs that may differ in declared fields.

NAMES = {"machine.compile": "COMPILE", "seed": "SEED"}
# Losses of each document after the change.
OTHER = {"x": (30.4, 5, 10), "y": (29.2, 6, 10)}


@pytest.fixture
def judged(tmp_path):
    def find(axis=(), labels=(), **other):
        a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **other)
        return compare_runs(RunRecord(a), RunRecord(b), NAMES, axis, labels)

    return find


def test_the_same_run_twice_is_bitwise_and_one_that_parts_is_told(judged):
    assert judged()["verdict"] == "BITWISE"
    found = judged(losses=(3.5, 3.25))
    assert (found["verdict"], EXIT_CODES[found["verdict"]]) == ("DIVERGED", 1)
    assert "first      metrics.jsonl, iteration 2: loss 3.2 and 3.25" in comparison_to_text(found)


def test_another_setting_is_refused_unless_it_is_the_axis(judged):
    other = {"identity": changed(IDENTITY, machine__compile=True), "documents": OTHER}
    found = judged(**other)
    assert (found["verdict"], EXIT_CODES[found["verdict"]]) == ("NOT COMPARABLE", 4)
    assert found["reasons"] == ["COMPILE: False, True"] and found["losses"] is None
    found = judged(axis=["COMPILE"], **other)
    assert (found["verdict"], EXIT_CODES[found["verdict"]]) == ("COMPARED", 0)
    assert found["axis"] == ["COMPILE: False, True"] and found["labels"] == []
    assert found["losses"]["a_minus_b"] == pytest.approx(0.8 / 20)
    # Exactly one knob: the torch version is another one.
    other["manifest"] = changed(MANIFEST, origin__torch="2.12.0")
    assert judged(axis=["COMPILE"], **other)["reasons"] == ["torch: 2.13.0, 2.12.0"]
    found = judged(axis=["COMPILE"], labels=["torch"], **other)
    assert found["verdict"] == "COMPARED" and found["labels"] == ["torch: 2.13.0, 2.12.0"]
    assert "  label      torch: 2.13.0, 2.12.0\n" in comparison_to_text(found)


def test_a_field_that_nobody_has_is_an_error(judged):
    with pytest.raises(ConfigError) as caught:
        judged(axis=["WEATHER"])
    assert caught.value.codes == ["usage.unknown-field"]
    assert "AXIS" in str(caught.value) and "'WEATHER'" in str(caught.value)


def test_losses_on_other_documents_are_not_subtracted(judged):
    found = judged(labels=["documents"], documents={"z": (31.4, 5, 10)})
    assert found["verdict"] == "COMPARED" and found["losses"] is None
    (line,) = (
        line for line in comparison_to_text(found).splitlines() if line.startswith("  losses ")
    )
    assert "not comparable" in line


def test_paired_losses_by_hand(tmp_path):
    a = write_run(tmp_path / "a", documents={**DOCUMENTS, "z": (30.0, 5, 10)})
    b = write_run(tmp_path / "b", documents={**OTHER, "z": (29.5, 5, 10)})
    found = compare_document_losses(RunRecord(a).documents, RunRecord(b).documents)
    # +0.1, -0.02 and +0.05 nats per token.
    assert found["mean_a_minus_b"] == pytest.approx(0.13 / 3)
    assert found["sd"] == pytest.approx(0.0602771, abs=1e-6)
    assert (found["a_better"], found["equal"], found["documents"]) == (1, 0, 3)


def test_one_training_each_has_a_difference_and_no_p(tmp_path):
    documents = {name: (30.0 - i, 5, 10) for i, name in enumerate("abcdefgh")}
    better = {name: (loss - 0.5, n, m) for name, (loss, n, m) in documents.items()}
    a = write_run(tmp_path / "a", documents=documents)
    b = write_run(tmp_path / "b", documents=better, identity=changed(IDENTITY, seed=2))
    found = compare_runs(RunRecord(a), RunRecord(b), NAMES, ["SEED"])
    text = comparison_to_text(found)
    # A sign test over these documents would give p = 2 / 2^8 for two seeds of one configuration.
    assert "documents  8: mean A - B +0.0500, sd 0.0000; A better on 0 (0%), equal on 0\n" in text
    assert "loss       A - B = +0.0500 nats per token (A 2.6500, B 2.6000)\n" in text
    assert "one training each: this does not show an effect" in text and "make verdicts" in text
    assert "p=" not in text and "sign test" not in text
    document = json.loads(comparison_to_json(found))
    assert document["schema_version"] == 4
    assert document["losses"].keys() == {
        *("loss_a", "loss_b", "a_minus_b", "documents", "mean_a_minus_b", "sd"),
        *("a_better", "equal"),
    }
