"""Pairs of runs that differ only in torch.compile, and their figures."""

import json
import struct

import pytest

from lib.tracking.compile_impact import (
    compile_pairs_to_json,
    compile_pairs_to_text,
    plot_compile_impact,
    read_compile_pairs,
)
from lib.tracking.sources import RunDirSource
from tests.errors import error_of
from tests.lib.tracking.conftest import PROJECT, record_run


@pytest.fixture
def folder(tmp_path):
    """Write two pairs, and a run without a partner."""
    for step, speed in (("baseline", 1000.0), ("ra", 800.0)):
        record_run(tmp_path / f"s/{step}-s1-0000000a", step=step, speed=speed)
        compiled = {"step": step, "speed": 1.5 * speed, "compile_model": True}
        record_run(tmp_path / f"s/{step}-s1-0000000b", **compiled)
    record_run(tmp_path / "s/alone-s1-0000000c", step="alone")
    return tmp_path


def pairs_of(folder, *named):
    return read_compile_pairs(RunDirSource(folder), PROJECT, named)


def test_runs_are_paired_when_nothing_else_differs(folder):
    pairs = pairs_of(folder)
    assert [pair.name for pair in pairs] == ["baseline-s1-0000000b", "ra-s1-0000000b"]
    # Without the first interval, which contains compilation.
    line = "  tokens per second  eager 1,005.00  compiled 1,505.00  ratio 1.498"
    assert f"baseline-s1-0000000b{line}" in compile_pairs_to_text(pairs)
    document = json.loads(compile_pairs_to_json(pairs))["pairs"][0]
    assert document["compiled"]["run"] == "baseline-s1-0000000b"
    assert document["eager"]["means"]["tokens_per_second"] == 1005.0


def test_a_run_name_selects_its_pair(folder):
    assert [pair.name for pair in pairs_of(folder, "ra-s1-0000000a")] == ["ra-s1-0000000b"]
    assert error_of(pairs_of, folder, "alone-s1-0000000c").codes == ["run.no-compile-pair"]
    # Of two runs of one side, too.
    record_run(folder / "s/baseline-s1-0000000d", step="baseline")
    error = error_of(pairs_of, folder)
    assert error.codes == ["run.ambiguous"]
    assert all(f"baseline-s1-0000000{x} (" in str(error) for x in "ad")
    named = ["baseline-s1-0000000d", "ra-s1-0000000a"]
    assert [pair.runs["eager"] for pair in pairs_of(folder, *named)] == named


def test_a_cell_of_a_matrix_is_the_other_side(tmp_path):
    """Pair runs that have other step names, and symbols that went without an effect; no others."""
    compiled = {"COMPILE": True, "COMPILE_EAGER_TWIN": True}
    record_run(tmp_path / "s/ra-s1-0000000a", step="ra", compile_model=True, symbols=compiled)
    eager = {"COMPILE": False, "COMPILE_EAGER_TWIN": False}
    record_run(tmp_path / "s/ra-compile-n-s1-0000000b", step="ra-compile-n", symbols=eager)
    record_run(tmp_path / "s/ra-s2-0000000c", step="ra", symbols=eager | {"SEED": 2})
    (pair,) = pairs_of(tmp_path)
    assert pair.runs["eager"] == "ra-compile-n-s1-0000000b"


def test_one_log_interval_alone_is_no_speed(tmp_path):
    for name, compiled in (("a", False), ("b", True)):
        run = record_run(tmp_path / f"s/ra-s1-0000000{name}", compile_model=compiled)
        run.timing.write_text(run.timing.read_text().splitlines(keepends=True)[0])
        run.telemetry.unlink()
    pairs = pairs_of(tmp_path)
    assert compile_pairs_to_text(pairs) == "\n"
    assert error_of(plot_compile_impact, pairs, tmp_path).codes == ["run.missing-metric"]


@pytest.mark.slow
def test_four_figures_of_300_dots_per_inch(folder, tmp_path):
    # A third of the panels, of which each takes a second.
    for telemetry in folder.glob("s/ra-*/telemetry.jsonl"):
        telemetry.unlink()
    paths = plot_compile_impact(pairs_of(folder, "ra-s1-0000000b"), tmp_path)
    assert [path.name for path in paths] == [
        "torch_compile_comparison.png",
        "torch_compile_grouped.png",
        "torch_compile_before_after.png",
        "ra-s1-0000000b_vs_baseline.png",
    ]
    for path in paths:
        data = path.read_bytes()
        at = data.index(b"pHYs") + 4
        # Dots per metre, in the PNG itself.
        assert struct.unpack(">II", data[at : at + 8]) == (11811, 11811)
