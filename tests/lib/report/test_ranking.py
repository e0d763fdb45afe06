"""The ranking of the points of a sweep."""

from gpt2.study.document import ranking
from lib.report.study import read_study
from tests.lib.report.documents import document_of

LOSSES = {"1e-3": 3.0, "2e-3": 2.5, "3e-3": None, "4e-3": 2.75}


def rows_of(runs, **options):
    return document_of(read_study("sweep", runs, **options))["rows"]


def test_points_are_ranked_by_their_mean_loss_without_words(make_run):
    """One point has no result with the second seed; comparisons with the first point have words."""
    runs = []
    for number, (rate, loss) in enumerate(LOSSES.items()):
        for seed in (1, 2, 3):
            shifted = (loss or 2.6) + seed / 100 + number * (seed % 2) / 1000
            result = None if loss is None and seed == 2 else shifted
            levels = {"LEARNING_RATE": rate}
            runs.append(make_run(rate, result, seed=seed, number=number, levels=levels))
    rows = rows_of(runs)
    assert "BETTER" in {row["baseline_verdict"] for row in rows}
    section = ranking(rows)
    assert section.header == ["rank", "LEARNING_RATE", "val loss", "Δ lowest", "state"]
    assert [row[:2] + row[3:] for row in section.rows] == [
        ["1", "2e-3", "lowest", "done"],
        ["2", "3e-3", "+0.1013", "2 of 3 done, new"],
        ["3", "4e-3", "+0.2513", "done"],
        ["4", "1e-3", "+0.4993", "done"],
    ]
    assert section.rows[0][2] == "2.5207 ± 0.0100 n=3"
    assert not any(word in str(section) for word in ("BETTER", "WORSE", "INCONCLUSIVE"))


def test_a_point_that_diverged_has_no_rank_and_one_point_no_ranking(make_run):
    runs = [make_run(s, 3.0, levels={"A": s}, number=i) for i, s in enumerate("ab")]
    assert len(ranking(rows_of(runs)).rows) == 2
    # It ends at the loss of an untrained model.
    diverged = [*runs[:1], make_run("c", 20.0, levels={"A": "c"}, number=2)]
    assert rows_of(diverged)[1]["val_loss"] is None and ranking(rows_of(diverged)) is None
    assert ranking(rows_of(runs, label_by=["data"])) is None
