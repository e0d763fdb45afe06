"""Detection of tensors with NaN and infinity, and the table of these tensors."""

import math

import torch

from gpt2.training.nonfinite import (
    COLUMNS,
    MAX_ROWS_SHOWN,
    bad_modules,
    find_nonfinite,
    format_table,
    json_number,
)
from lib.env.options import NumericsOptions

LONG = "h.11.attn.gates.ra_cross_token.a_name_that_goes_on_and_on_without_an_end.weight"


def test_counts_are_exact_and_good_tensors_are_left_out():
    bad = torch.zeros(3, 4, dtype=torch.float64)
    bad[1, 2], bad[1, 3], bad[2, 0], bad[2, 3] = math.nan, math.inf, -math.inf, math.nan
    (row,) = find_nonfinite({"good": torch.ones(2), "none": None, LONG: bad}, "gradient")
    counts = {"nonfinite": 4, "nan": 2, "inf": 2}
    where = {"param": LONG, "holds": "gradient", "shape": [3, 4], "dtype": "float64"}
    # Row 1, column 2 of 4.
    assert row == {**where, "device": "cpu", **counts, "first_bad_index": 6}


def test_a_table_has_its_columns_and_whole_names():
    tensor = torch.tensor([math.nan, 1.0])
    rows = find_nonfinite({LONG: tensor, "b": -tensor}, "weight")
    head, first, second = format_table(rows)
    assert tuple(head.split()) == COLUMNS
    assert first.split() == [LONG, "[2]", "float32", "cpu", "1", "1", "0"]
    assert first.index("[2]") == second.index("[2]") == head.index("shape")
    many = find_nonfinite({str(i): tensor for i in range(MAX_ROWS_SHOWN + 3)}, "weight")
    assert len(many) == MAX_ROWS_SHOWN + 3
    assert format_table(many)[-1] == "and 3 more" and len(format_table(many)) == MAX_ROWS_SHOWN + 2


def test_json_has_words_for_what_it_has_no_number_for():
    values = [math.nan, math.inf, -math.inf, 0.1]
    assert list(map(json_number, values)) == ["NaN", "infinity", "-infinity", 0.1]


def test_the_first_bad_module_is_the_innermost():
    class Spoils(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs() / 0.0

    class Masks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - math.inf

    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), Spoils(), torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(torch.nn.Identity(), inner)
    with bad_modules(model) as names:
        model(torch.ones(1, 2))
    assert names == ["1.1"]
    assert not inner[1]._forward_hooks
    mask = Masks()
    with bad_modules(mask) as names:
        mask(torch.ones(1))
    assert names == []


def test_which_iterations_are_looked_at():
    assert [i for i in range(1, 8) if NumericsOptions(True, 3, False).due(i)] == [3, 6]
    assert not NumericsOptions(False, 1, True).due(1)
    assert NumericsOptions(True, 1, True).debug_flags == ["check_numerics", "detect_anomaly"]
    assert NumericsOptions(False, 0, False).debug_flags == []
