"""A matrix, a sweep and a trial end to end, and errors raised before anything is written."""

import re

import pytest

from lib.config.dotconfig import read_config
from tests.build_folder import write_build
from tests.integration.conftest import SINGLE

MATRIX = {
    "RA_MLA_ABLATION_MODE": None,
    "TEST_MATRIX_MODE": True,
    "MIN_LEARNING_RATE": "0",
    # At a learning rate of 10, weights are multiplied by -29 in every step until they overflow. At
    # 1e-2, every optimizer learns more than 0.1 nats.
    "WEIGHT_DECAY": "3",
    "MAX_ITERS": 60,
    "TEST_MATRIX_AXES": "OPTIMIZER=sgd,adamwprune PRUNING=magnitude,state LEARNING_RATE=1e-2,10",
}
SCRIPT = "all"


def cells(line: str) -> list[str]:
    """Return the fields of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_cell_that_fails_is_a_hole_and_the_rest_is_a_table(build):
    folder = build(**MATRIX)
    code, table, said = folder.command(SCRIPT)
    assert code == 1, said
    assert said.endswith("EXIT    code 1\n")
    rows = [cells(line) for line in table.splitlines() if line.startswith("|")]
    # Trainings of a few steps may be marked as unstable.
    states = {r[1]: [r[-2], r[-1].replace("UNSTABLE", "done")] for r in rows if r[0].isdecimal()}
    assert states == {
        "sgd-magnitude-learning-rate-1e-2": ["50.0%", "done"],
        "sgd-magnitude-learning-rate-10": ["-", "failed"],
        "adamwprune-state-learning-rate-1e-2": ["50.0%", "done"],
        "adamwprune-state-learning-rate-10": ["-", "failed"],
    }
    (skipped,) = (line for line in table.splitlines() if "sgd-state-learning-rate-1e-2: " in line)
    assert "PRUNING_STATE=y: " in skipped and "OPTIMIZER_ADAMWPRUNE=y" in skipped
    assert re.search("sgd-magnitude-learning-rate-10 s1: failed: .*NaN", table)


def test_a_sweep_takes_what_is_done_and_ranks_it_too(build):
    folder = build(**SINGLE, LEARNING_RATE="2e-3")
    assert folder.command(SCRIPT)[0] == 0
    code, table, said = folder.command(SCRIPT, SWEEP="LEARNING_RATE=1e-3,2e-3,4e-3")
    assert code == 0, said
    assert re.search(r"sweep/01-learning-rate-2e-3 s1: .* single/run-s1-", table)
    assert len(list(folder.path.glob("results/sweep/*-s1-*"))) == 2
    section = table.partition("## Ranking")[2].partition("\n## ")[0]
    rows = [cells(line) for line in section.splitlines() if line.startswith("|")][2:]
    assert {rate for _, rate, *_ in rows} == {"1e-3", "2e-3", "4e-3"}
    losses = [float(loss) for _, _, loss, *_ in rows]
    assert losses == sorted(losses)
    speed = table.partition("## Speed")[2]
    assert all(f"learning-rate-{rate} s1" in speed for rate in ("1e-3", "2e-3", "4e-3"))
    options = {"SWEEP": "LEARNING_RATE=1e-3,2e-3,4e-3", "RUNS": "*-1e-3,*-4e-3"}
    code, _, said = folder.command("figures", **options)
    assert code == 0, said
    losses = (folder.path / "results/sweep/figures-selection/losses.svg").read_text()
    assert re.findall(r">\d (learning-rate-[^<]*)<", losses) == [
        "learning-rate-1e-3",
        "learning-rate-4e-3",
    ]
    assert not (folder.path / "results/sweep/figures").exists()


@pytest.mark.parametrize(
    ("axes", "values", "sweep"),
    [
        # An empty SWEEP= counts as unset.
        ("", ["[design.empty]"], False),
        ("DROPOUT=0.1,7", ["DROPOUT: ", "7", "0.9", "[config.out-of-range]"], False),
        ("LEARNING_RAT=1e-3", ["nearest: LEARNING_RATE", "[config.unknown-symbol]"], True),
    ],
)
def test_an_invalid_axis_is_one_error_and_writes_nothing(build, axes, values, sweep):
    folder = build(**SINGLE)
    if not sweep:
        settings = {"TEST_MATRIX_MODE": True, "TEST_MATRIX_AXES": axes}
        write_build(folder.path, settings, read_config(folder.path / ".config"))
    before = sorted(folder.path.rglob("*"))
    code, table, said = folder.command(SCRIPT, SWEEP=axes if sweep else "")
    assert (code, table) == (2, "")
    assert said.count("ERROR") == 1 and said.endswith("EXIT    code 2\n")
    assert all(value in said for value in values), said
    assert sorted(folder.path.rglob("*")) == before
