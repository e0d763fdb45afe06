"""The first difference between two runs."""

from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.report.compare import compare_bitwise, comparison_to_text, new_comparison
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST, changed, write_run

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


def test_the_same_bytes(compared):
    found = compared()
    assert text(found).startswith("the same   3 rows of metrics.jsonl, 2 documents, weights ")


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
