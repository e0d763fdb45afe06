"""per_query.csv: exact round trip, and refusal of invalid files."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lib.json_files import DamagedRecord
from lib.runs.documents import (
    DocumentResult,
    evaluation_metrics,
    expected_calibration_error,
    parse_document_results,
    to_csv,
    train_loss,
)
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

FILE = Path("per_query.csv")
ROW = DocumentResult("a, b", "texts", "d" * 64, "e" * 64, "val", 3, 7, 0, 1, 0.1 + 0.2, 1, 12)
OTHER = replace(ROW, item_id="c", doc_sha256="", n_bytes=0, nll_sum=1e-17)


def test_rows_survive_the_file():
    # Documents of one name are rows of their own, also one without any loss.
    certain = replace(ROW, nll_sum=0.0, n_correct=3)
    text = to_csv([ROW, OTHER, certain])
    assert parse_document_results(FILE, text.encode()) == [ROW, OTHER, certain]
    header, first, other, _ = (line.split(",") for line in text.splitlines())
    derived = slice(header.index("nll_sum"), header.index("n_correct"))
    # The first name has a comma.
    exact = [*map(str, (ROW.nll_sum, ROW.nll_sum / 3, ROW.bits_per_byte))]
    assert first[1:][derived] == exact and "0.30000000000000004" in exact
    assert other[derived] == ["1e-17", str(1e-17 / 3), ""]
    assert ROW.bits_per_byte == pytest.approx(ROW.nll_sum / 7 / 0.6931471805599453)
    assert OTHER.bits_per_byte is None


def test_a_device_in_place_of_the_file_is_not_read(tmp_path):
    """Reading /dev/zero would not end."""
    (tmp_path / "per_query.csv").symlink_to("/dev/null")
    with pytest.raises(DamagedRecord, match="regular"):
        _ = RunRecord(RunDir(tmp_path)).documents


DAMAGES = {
    "empty": (lambda text: "", "item_id,"),
    "a placeholder": (lambda text: "note,placeholder\n", "item_id,"),
    "no UTF-8": (lambda text: "\xff\n", "decode"),
    "no rows": (lambda text: text.splitlines()[0] + "\n", "at least one row"),
    "a cell less": (lambda text: text.replace(",val,", ","), "line 2: 14 "),
    "a word for a number": (lambda text: text.replace(",3,7,", ",three,7,"), "'three'"),
    "nan": (lambda text: text.replace("0.30000000000000004", "nan"), "nll_sum"),
    "infinite": (lambda text: text.replace("0.30000000000000004", "inf"), "nll_sum"),
    "negative": (lambda text: text.replace("0.30000000000000004", "-1e-9"), "nll_sum"),
    "more right than there are": (lambda t: t.replace(",1,12,", ",4,12,"), "n_correct <= n_tokens"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_row_is_refused(damage):
    change, expected = DAMAGES[damage]
    with pytest.raises(DamagedRecord) as caught:
        parse_document_results(FILE, change(to_csv([ROW])).encode("latin-1"))
    assert expected in str(caught.value)


def test_figures_are_weighted_by_tokens_and_summed_exactly():
    values = ((1, 1e16, 1), (2, 1.0, 0), (1, 1.0, 1))
    rows = [replace(ROW, n_tokens=n, nll_sum=nats, n_correct=right) for n, nats, right in values]
    found = evaluation_metrics(rows)
    # Added up one by one, 1e16 + 1 + 1 is 1e16.
    assert found["val_loss"] == (10**16 + 2) / 4 and found["val_perplexity"] == "infinite"
    assert (found["token_accuracy"], found["eval_tokens"]) == (0.5, 4)
    assert found["bits_per_byte"] == pytest.approx((10**16 + 2) / 21 / math.log(2))


def test_the_calibration_error_of_a_worked_example():
    """Three answers at 0.9, two of them correct, and one incorrect at 0.2: 0.7/4 + 0.2/4."""
    bins = {"n_tokens": [1, 3], "n_correct": [0, 2], "confidence_sum": [0.2, 2.7]}
    assert expected_calibration_error(bins) == pytest.approx((0.7 + 0.2) / 4)


def test_the_training_loss_is_the_mean_of_the_last_tenth():
    rows = [{"kind": "train", "iteration": i, "loss": float(i)} for i in range(1, 31)]
    rows += [{"kind": "eval", "iteration": 30, "loss": 1e9}]
    assert train_loss(rows, 30) == 29.0
    assert train_loss(rows[:5], 5) == 5.0
