"""A matrix, and a sweep with what is done before, end to end."""

import re

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


def rows(table: str) -> list[list[str]]:
    """Return the fields of the rows of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_cell_that_fails_is_a_hole_and_the_rest_is_a_table(build):
    code, table, said = build(**MATRIX).command("all")
    assert code == 1 and said.endswith("EXIT    code 1\n"), said
    # Trainings of a few steps may be marked as unstable.
    states = {
        row[1]: [row[-2], row[-1].replace("UNSTABLE", "done")]
        for row in rows(table)
        if row[0].isdecimal()
    }
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
    assert folder.command("all")[0] == 0
    sweep = {"SWEEP": "LEARNING_RATE=1e-3,2e-3,4e-3"}
    code, table, said = folder.command("all", **sweep)
    assert code == 0, said
    assert re.search(r"sweep/01-learning-rate-2e-3 s1: .* single/run-s1-", table)
    assert len(list(folder.path.glob("results/sweep/*-s1-*"))) == 2
    ranked = rows(table.partition("## Ranking")[2].partition("\n## ")[0])[2:]
    assert {rate for _, rate, *_ in ranked} == {"1e-3", "2e-3", "4e-3"}
    losses = [float(loss) for _, _, loss, *_ in ranked]
    assert losses == sorted(losses)
    speed = table.partition("## Speed")[2]
    assert all(f"learning-rate-{rate} s1" in speed for rate in ("1e-3", "2e-3", "4e-3"))
    code, _, said = folder.command("figures", **sweep, RUNS="*-1e-3,*-4e-3")
    assert code == 0, said
    drawn = (folder.path / "results/sweep/figures-selection/losses.svg").read_text()
    named = re.findall(r">\d (learning-rate-[^<]*)<", drawn)
    assert named == ["learning-rate-1e-3", "learning-rate-4e-3"]
    assert not (folder.path / "results/sweep/figures").exists()
