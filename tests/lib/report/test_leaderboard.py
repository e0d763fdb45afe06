"""Ranking of finished sweep runs from their directories."""

import json
import os

import pytest

from lib.errors import ConfigError
from lib.files import write_json
from lib.json_files import DamagedRecord
from lib.report.leaderboard import REUSED_RUNS_FILE, read_leaderboard, record_reused_runs
from lib.report.looks import LookPlan
from lib.report.table_text import leaderboard_to_json, leaderboard_to_text
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import WARMUP

LOOKS = LookPlan((3, 5), (0.5, 0.4))


@pytest.fixture
def swept(make_run):
    """Return a factory of finished sweep runs with given symbols; returns the sweep's folder."""

    def make(slug, loss, seed=1, data="d1", **symbols):
        run = make_run(f"{slug}-s{seed}", loss, seed=seed, study="sweep", data=data)
        directory = RunDir(run.path)
        if loss is not None:
            write_json(
                directory.resolved_config,
                {"identity": WARMUP, "symbols": {"SEED": seed, "N_LAYER": 2, **symbols}},
            )
        return run.path.parent

    return make


def test_best_first_with_the_symbols_that_differ_and_seeds_together(swept):
    swept("slow", 3.2, LEARNING_RATE="1e-4")
    swept("slow", 3.4, seed=2, LEARNING_RATE="1e-4")
    folder = swept("fast", 3.0, LEARNING_RATE="1e-3")
    board = read_leaderboard(folder, LOOKS)
    assert [entry.settings for entry in board.entries] == [
        {"LEARNING_RATE": "1e-3"},
        {"LEARNING_RATE": "1e-4"},
    ]
    assert board.entries[1].val_loss.mean == pytest.approx(3.3) and board.entries[1].val_loss.n == 2
    text = leaderboard_to_text(board)
    assert text.index("1e-3") < text.index("3.3000") and "N_LAYER" not in text
    assert json.loads(leaderboard_to_json(board))["entries"][0]["tokens"] == 2048


def test_combinations_have_verdicts_against_the_lowest_and_no_rank(swept):
    losses = {"a": (3.2, 3.25, 3.1), "b": (3.0, 3.052, 2.901), "c": (3.003, 3.0515, 2.9015)}
    for slug, by_seed in losses.items():
        for seed, loss in enumerate(by_seed, 1):
            folder = swept(slug, loss, seed=seed, LEARNING_RATE=slug)
    board = read_leaderboard(folder, LOOKS)
    assert [entry.settings["LEARNING_RATE"] for entry in board.entries] == ["b", "c", "a"]
    lowest, middle, highest = (entry.verdict for entry in board.entries)
    assert lowest is None and middle.word == "INCONCLUSIVE" and highest.word == "WORSE"
    # Every pair of three combinations.
    assert middle.planned == highest.planned == 3
    text = leaderboard_to_text(board)
    assert "| reference" in text and "3 pairs" in text and "rank |" not in text
    narrow = leaderboard_to_text(board, 60)
    assert "|" not in narrow and max(map(len, narrow.splitlines())) <= 60
    assert narrow.splitlines()[-3].split()[0] == "b" and "3 pairs" in narrow
    document = json.loads(leaderboard_to_json(board))
    assert document["entries"][2]["verdict"]["verdict"] == "WORSE"
    run = RunDir(next(folder.glob("a-s2-*")))
    write_status(run, RunStatus(State.FAILED, 1, "loss is NaN at it 7"))
    *_, last = read_leaderboard(folder, LOOKS).entries
    assert (last.verdict.word, last.verdict.reason) == ("DIVERGED", "1/3 (seed 2)")
    assert "DIVERGED 1/3" in leaderboard_to_text(read_leaderboard(folder, LOOKS))


def test_pairs_are_judged_at_the_planned_numbers_of_seeds_only(swept):
    """Every number of seeds has its share, however often the leaderboard is read."""
    noise, seen = (0.0, 0.05, -0.1, 0.02, -0.03, 0.07, 0.01), {}
    for seed, block in enumerate(noise, 1):
        wide = 3.1 + block + 0.001 * (-1) ** seed * seed
        swept("a", 3.0 + block, seed=seed, LEARNING_RATE="a")
        folder = swept("b", wide, seed=seed, LEARNING_RATE="b")
        _, entry = read_leaderboard(folder, LOOKS).entries
        assert entry.verdict.n == seed
        seen[seed] = entry.verdict.word if entry.verdict.is_given else ""
        if seed == 4:
            assert "n=4: judged at 3, 5 seeds" in leaderboard_to_text(
                read_leaderboard(folder, LOOKS)
            )
    assert seen == {1: "", 2: "", 3: "WORSE", 4: "", 5: "WORSE", 6: "WORSE", 7: "WORSE"}
    # Half of the reserve of 0.1, and half of the rest.
    assert [LOOKS.share_of(n) for n in (2, 3, 4, 5, 6)] == [0.0, 0.5, 0.0, 0.4, 0.05]
    assert entry.verdict.share == pytest.approx(0.025)
    p = entry.verdict.test.p
    assert entry.verdict.test.p_adjusted == pytest.approx(p / 0.025)
    assert sum(LOOKS.share_of(n) for n in range(1, 60)) == pytest.approx(1)


def test_what_cannot_be_compared_is_named_and_not_ranked(swept):
    swept("a", 3.2, LEARNING_RATE="1")
    swept("b", 3.1, LEARNING_RATE="2")
    folder = swept("c", 1.0, LEARNING_RATE="3", data="another")
    (folder / "d-s1-0123abcd").mkdir()
    board = read_leaderboard(folder, LOOKS)
    assert len(board.entries) == 2
    assert any("c-s1" in line and "not comparable: data" in line for line in board.left_out)
    assert "d-s1-0123abcd: new" in board.left_out


def test_a_run_from_another_study_is_ranked_until_the_sweep_has_its_own(swept, make_run):
    folder = swept("slow", 3.2, LEARNING_RATE="1e-4")
    taken = make_run("run", 3.0, study="single")
    settings = {"SEED": 1, "N_LAYER": 2, "LEARNING_RATE": "1e-3"}
    write_json(RunDir(taken.path).resolved_config, {"identity": WARMUP, "symbols": settings})
    taken.path.rename(taken.path.with_name("run-s1-0123abcd"))
    place = taken.path.with_name("run-s1-0123abcd")
    for _ in range(2):
        record_reused_runs(folder, [folder / "slow-s1-s1", place])
    assert (folder / REUSED_RUNS_FILE).read_text() == "../single/run-s1-0123abcd\n"
    best, second = read_leaderboard(folder, LOOKS).entries
    assert (best.val_loss.mean, best.runs) == (3.0, ["run-s1-0123abcd"])
    assert second.val_loss.mean == 3.2
    # Trained here too, it would count twice.
    place.rename(folder / "fast-s1-0123abcd")
    place.mkdir()
    board = read_leaderboard(folder, LOOKS)
    assert [entry.val_loss.n for entry in board.entries] == [1, 1] and not board.left_out
    place.rmdir()
    (folder / "fast-s1-0123abcd").rename(folder.parent / "gone")
    assert len(read_leaderboard(folder, LOOKS).entries) == 1


@pytest.mark.parametrize("content", [b"\xff", None])
def test_a_damaged_list_of_reused_runs_is_an_error(tmp_path, content):
    """Reading a pipe would wait forever."""
    path = tmp_path / REUSED_RUNS_FILE
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(DamagedRecord):
        read_leaderboard(tmp_path, LOOKS)


def test_nothing_to_rank_is_an_error_with_a_command(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_leaderboard(tmp_path / "sweep", LOOKS)
    assert caught.value.codes == ["run.not-finished"]
    assert "make SWEEP=" in caught.value.problems[0].next
