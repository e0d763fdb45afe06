"""Pairs of runs that differ only in torch.compile, and their figures."""

import struct
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.tracking.compile_impact import (
    compile_pairs_to_text,
    plot_compile_impact,
    read_compile_pairs,
)
from lib.tracking.sources import RunDirSource
from tests.lib.tracking.conftest import PROJECT, record_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two pairs, and a run without a partner."""
    for step, speed in (("baseline", 1000.0), ("ra", 800.0)):
        record_run(tmp_path / f"s/{step}-s1-0000000a", step=step, speed=speed)
        compiled = {"step": step, "speed": 1.5 * speed, "compile_model": True}
        record_run(tmp_path / f"s/{step}-s1-0000000b", **compiled)
    record_run(tmp_path / "s/alone-s1-0000000c", step="alone")
    return tmp_path


def test_runs_are_paired_when_nothing_else_differs(folder: Path) -> None:
    pairs = read_compile_pairs(RunDirSource(folder), PROJECT)
    assert [pair.name for pair in pairs] == ["baseline", "ra"]
    first = pairs[0]
    assert (first.eager.run, first.compiled.run) == ("baseline-s1-0000000a", "baseline-s1-0000000b")
    # Without the first interval, which contains compilation.
    assert first.eager.means["tokens_per_second"] == 1005.0
    assert first.ratio("tokens_per_second") == pytest.approx(1505 / 1005)
    assert (
        "baseline  tokens per second  eager 1,005.00  compiled 1,505.00"
        in compile_pairs_to_text(pairs)
    )


def test_a_run_name_means_its_pair(folder: Path) -> None:
    (pair,) = read_compile_pairs(RunDirSource(folder), PROJECT, ["ra-s1-0000000a"])
    assert pair.name == "ra"
    with pytest.raises(ConfigError) as caught:
        read_compile_pairs(RunDirSource(folder), PROJECT, ["alone-s1-0000000c"])
    assert caught.value.codes == ["run.no-compile-pair"]


def test_two_runs_of_one_side_are_chosen_among_by_name_alone(folder: Path) -> None:
    record_run(folder / "s/baseline-s1-0000000d", step="baseline")
    with pytest.raises(ConfigError) as caught:
        read_compile_pairs(RunDirSource(folder), PROJECT)
    assert caught.value.codes == ["run.ambiguous"]
    assert all(f"baseline-s1-0000000{x} (" in str(caught.value) for x in "ad")
    named = ["baseline-s1-0000000d", "ra-s1-0000000a"]
    pairs = read_compile_pairs(RunDirSource(folder), PROJECT, named)
    assert [pair.eager.run for pair in pairs] == named


def test_a_cell_of_a_matrix_is_the_other_side(tmp_path: Path) -> None:
    """Pair runs that have other step names, and symbols that went without an effect."""
    compiled = {"COMPILE": True, "COMPILE_EAGER_TWIN": True}
    record_run(tmp_path / "s/ra-s1-0000000a", step="ra", compile_model=True, symbols=compiled)
    eager = {"COMPILE": False, "COMPILE_EAGER_TWIN": False}
    record_run(tmp_path / "s/ra-compile-n-s1-0000000b", step="ra-compile-n", symbols=eager)
    (pair,) = read_compile_pairs(RunDirSource(tmp_path), PROJECT)
    assert (pair.name, pair.eager.run) == ("ra", "ra-compile-n-s1-0000000b")


def test_no_pair_says_what_keeps_the_nearest_two_apart(tmp_path: Path) -> None:
    record_run(tmp_path / "s/ra-s1-0000000a", compile_model=True, symbols={"SEED": 1, "A": 1})
    record_run(tmp_path / "s/ra-s1-0000000b", symbols={"SEED": 2, "A": 1})
    record_run(tmp_path / "s/ra-s1-0000000c", symbols={"SEED": 2, "A": 2})
    with pytest.raises(ConfigError) as caught:
        read_compile_pairs(RunDirSource(tmp_path), PROJECT)
    (problem,) = caught.value.problems
    assert problem.code == "run.no-compile-pair" and problem.what.endswith(" SEED")
    assert "ra-s1-0000000a" in problem.what and "ra-s1-0000000b" in problem.what
    with pytest.raises(ConfigError) as caught:
        read_compile_pairs(RunDirSource(tmp_path), PROJECT, ["ra-s1-0000000c"])
    (problem,) = caught.value.problems
    assert problem.what.endswith(" A, SEED")
    assert "ra-s1-0000000c" in problem.what and "ra-s1-0000000a" in problem.what


def test_one_log_interval_alone_is_no_speed(tmp_path: Path) -> None:
    """Ignore the first interval, which contains compilation."""
    for name, compiled in (("a", False), ("b", True)):
        run = record_run(tmp_path / f"s/ra-s1-0000000{name}", compile_model=compiled)
        run.timing.write_text(run.timing.read_text().splitlines(keepends=True)[0])
        run.telemetry.unlink()
    pairs = read_compile_pairs(RunDirSource(tmp_path), PROJECT)
    assert compile_pairs_to_text(pairs) == "\n"
    with pytest.raises(ConfigError) as caught:
        plot_compile_impact(pairs, tmp_path)
    assert caught.value.codes == ["run.missing-metric"]


def test_steps_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for seed in (1, 2):
        for name, compiled in (("a", False), ("b", True)):
            path = tmp_path / f"s/ra-s{seed}-0000000{name}"
            record_run(path, step="ra", compile_model=compiled, symbols={"SEED": seed})
    pairs = read_compile_pairs(RunDirSource(tmp_path), PROJECT)
    assert [pair.name for pair in pairs] == ["ra-s1-0000000b", "ra-s2-0000000b"]


@pytest.mark.slow
def test_four_figures_of_300_dots_per_inch(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pairs = read_compile_pairs(RunDirSource(folder), PROJECT, ["ra-s1-0000000b"])
    paths = plot_compile_impact(pairs, tmp_path)
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
