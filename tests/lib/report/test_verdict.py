"""Verdicts on two runs, and the figures reported with them."""

import json

import pytest

from lib.errors import ConfigError
from lib.report.compare import (
    EXIT_CODES,
    compare_document_losses,
    compare_runs,
    comparison_to_json,
    comparison_to_text,
)
from lib.runs.record import RunRecord
from tests.lib.fabricated import DOCUMENTS, IDENTITY, MANIFEST, changed, write_run

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


def test_json_holds_the_verdict(judged):
    document = json.loads(comparison_to_json(judged(losses=(3.5, 3.25))))
    assert (document["verdict"], document["exit_code"]) == ("DIVERGED", 1)
    assert document["first"] | {"field": "loss", "a": 3.2, "b": 3.25} == document["first"]
