"""Every number of the page's tables against values computed here from the files of the runs.

The runs of each step have different losses at each seed, and the steps differ in parameters, time,
speed and FLOPs.
"""

import csv
import json
import math
import re
import statistics

import pytest

from lib.report.declarations import VerdictPlan
from lib.report.plots import study_figures
from lib.report.series import study_series
from lib.report.statistics import VerdictRule
from lib.report.study import read_study, study_document
from lib.runs.documents import bits_per_byte
from lib.runs.run import RunVariant
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST, changed, seal
from tests.lib.report.fabricated_study import write_study
from tests.lib.report.web_page import CONTEXT, Parsed, page_of

SEEDS = (1, 2, 3, 4, 5)
# The 97.5 % quantile of Student's t with 4 degrees of freedom, from a printed table.
T_4 = 2.776
FLOPS = {"base": 6.0e6, "wide": 7.5e6, "deep": 6.6e6, "high": 6.3e6}
PARENTS = {"wide": "base", "deep": "wide", "high": "base"}
# Of the losses to those of the baseline; that of deep to wide stays open.
SHIFTS = {"base": 0.0, "wide": -0.2, "deep": -0.203, "high": 0.15}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    variants = [
        RunVariant(name, f"title of {name}", number, PARENTS.get(name, ""), {"DROPOUT": "0.1"})
        for number, name in enumerate(SHIFTS)
    ]
    runs = write_study(tmp_path_factory.mktemp("numbers"), variants, len(SEEDS), documents=6)
    for run in runs:
        _rewrite(run)
    return runs


def _rewrite(run):
    """Give the run losses, costs and speeds of its own, and documents that agree with its loss."""
    files, number = RunDir(run.path), run.variant.number
    noise = 0.01 * math.sin(7.0 * run.seed + 3.0 * number)
    loss = 2.5 + 0.05 * run.seed + SHIFTS[run.variant.slug] + noise
    summary = json.loads(files.summary.read_text())
    rows = list(csv.DictReader(files.per_query.open()))
    for i, row in enumerate(rows):
        n_tokens = int(row["n_tokens"])
        row["nll_sum"] = (loss + 0.01 * (i - 2.5) * (1 + number)) * n_tokens
        row["nll_mean"] = row["nll_sum"] / n_tokens
        row["bits_per_byte"] = bits_per_byte(row["nll_sum"], int(row["n_bytes"]))
    with files.per_query.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    tokens = sum(int(row["n_tokens"]) for row in rows)
    summary["final"]["val_loss"] = sum(row["nll_sum"] for row in rows) / tokens
    summary["final"]["parameters"] = 850_000 + 21_250 * number
    summary["final"]["sparsity"] = 0.25 * number
    summary["final"]["sparsity_by_layer"] = {
        "h.0.c_fc.weight": 0.2 * number,
        "h.1.c_fc.weight": 0.3,
    }
    summary["final"]["prunable_weights"] = {"h.0.c_fc.weight": 10, "h.1.c_fc.weight": 10}
    summary["timing"]["train_seconds"] = 61.0 + 10 * number + run.seed
    summary["timing"]["tokens_per_second"] = 1000.0 + 100 * number + run.seed
    files.summary.write_text(json.dumps(summary))
    timing = {"iteration": 1, "tokens_per_second": 33.0, "written_at": 1.0}
    speeds = [0.1, 0.3 + 0.01 * number + 0.001 * run.seed, 0.9]
    files.timing.write_text("".join(json.dumps({**timing, "mfu": mfu}) + "\n" for mfu in speeds))
    digest = f"{number}{run.seed}" + "ab" * 31
    seal(files, changed(MANIFEST, final_weights_digest=digest))


@pytest.fixture(scope="module")
def table(runs):
    return read_study("demo", runs, plan=VerdictPlan(VerdictRule("own")))


@pytest.fixture(scope="module")
def page(table):
    return page_of(table, {**CONTEXT, "flops": FLOPS})


@pytest.fixture(scope="module")
def tables(page):
    return Parsed(page).tables


@pytest.fixture(scope="module")
def final(runs):
    """Return step → seed → summary of the run."""
    summaries = {}
    for run in runs:
        text = RunDir(run.path).summary.read_text()
        summaries.setdefault(run.variant.slug, {})[run.seed] = json.loads(text)
    return summaries


def losses(final, step):
    return [final[step][seed]["final"]["val_loss"] for seed in SEEDS]


def differences(final, step, other):
    return [a - b for a, b in zip(losses(final, step), losses(final, other))]


def number(text):
    """Return the number at the start of a text, with a typographic minus sign or none."""
    return float(re.match(r"[+−]?[\d.,]+(?:e-?\d+)?", text)[0].replace("−", "-").replace(",", ""))


def by_step(rows):
    return {row["step"]: row for row in rows}


def test_losses_and_costs(tables, final):
    rows = by_step(tables["Losses"])
    assert list(rows) == list(SHIFTS)
    for i, (step, row) in enumerate(rows.items()):
        values = losses(final, step)
        assert len(set(values)) == len(SEEDS)
        mean, sd = statistics.fmean(values), statistics.stdev(values)
        assert row["#"] == str(i)
        assert row["val loss"] == f"{mean:.4f} ± {sd:.4f} n=5"
        assert row["ppl"] == f"{math.exp(mean):.2f}"
        assert row["params"] == f"{850_000 + 21_250 * i:,}"
        assert row["tokens"] == "123k"
        assert number(row["FLOPs"]) == pytest.approx(FLOPS[step] * 120 * 1024, rel=0.005)
        seconds = 61 + 10 * i + 3
        assert row["time"] == f"{seconds // 60:02d}:{seconds % 60:02d}"
        speeds = tables["Machine"][i]
        assert speeds["run"] == step and speeds["tok/s"] == f"{1000 + 100 * i + 3:,}"
        assert speeds["MFU"] == f"{100 * (0.3 + 0.01 * i + 0.003):.1f}%"
        assert row["sparsity"] == (f"{25.0 * i}%" if i else "")
        if step == "base":
            assert row["Δ baseline"] == ""
        else:
            change = statistics.fmean(differences(final, step, "base"))
            assert number(row["Δ baseline"]) == pytest.approx(change, abs=5.1e-5)


def test_differences_and_intervals(tables, final, table):
    rows = tables["Verdicts"]
    pairs = [(row["step"], row["against"]) for row in rows]
    assert pairs == [("wide", "base"), ("deep", "base"), ("deep", "wide"), ("high", "base")]
    for row, (step, other) in zip(rows, pairs, strict=True):
        values = differences(final, step, other)
        mean = statistics.fmean(values)
        half = T_4 * statistics.stdev(values) / math.sqrt(len(SEEDS))
        shown = list(map(number, row["Δ ± 95 %"].split(" ± ")))
        assert shown == pytest.approx([mean, half], abs=1.1e-4) and row["n"] == "5"
        if row["verdict"] in ("BETTER", "WORSE"):
            assert row["verdict"] == ("BETTER" if mean < 0 else "WORSE") and half < abs(mean)
    words = [row["verdict"] for row in rows]
    assert words[:2] == ["BETTER", "BETTER"] and words[3] == "WORSE"
    assert words[2].startswith("INCONCLUSIVE +")
    document = study_document(table, CONTEXT)
    for row, verdict in zip(rows, document["verdicts"], strict=True):
        assert row["p"] == f"{verdict['p_of_word']:.2g}".replace("-", "−")
        assert verdict["more_seeds"] is None or row["verdict"].endswith(f"+{verdict['more_seeds']}")


def test_the_runs_of_a_difference(page, final):
    sources = Parsed(page).sources
    (text,) = [text for text in sources.values() if text.startswith("deep vs wide")]
    assert "seeds 1–5" in text
    for step in ("deep", "wide"):
        listed = ", ".join(f"{loss:.4f}" for loss in losses(final, step))
        assert listed in text.replace(" ,", ",")
    shown = text.partition("differences: ")[2].split(", ")
    values = differences(final, "deep", "wide")
    assert [number(each) for each in shown] == pytest.approx(values, abs=5.1e-5)


def test_conditions_are_relative_to_the_first_row(tables):
    rows = by_step(tables["Conditions"])
    assert set(rows["base"].values()) == {"base", "="}
    for i, step in ((1, "wide"), (2, "deep"), (3, "high")):
        assert rows[step]["parameters"] == f"+{100 * 21_250 * i / 850_000:.1f}%"
        flops = 100 * (FLOPS[step] / FLOPS["base"] - 1)
        assert rows[step]["FLOPs of a token"] == f"+{flops:.1f}%"
        assert rows[step]["tokens"] == "="
        assert rows[step]["time"] == f"+{100 * ((64 + 10 * i) / 64 - 1):.1f}%"


def test_runs(tables, runs, final):
    rows = {row["run"]: row for row in tables["Runs"]}
    assert len(rows) == len(runs) == 20
    for run in runs:
        row = rows[run.path.name]
        loss = final[run.variant.slug][run.seed]["final"]["val_loss"]
        assert row["val loss"] == f"{loss:.6f}" and row["seed"] == str(run.seed)
        assert row["config"] == run.config.hash8 and row["state"] == "done"
        assert row["commit"] == MANIFEST["code"]["git_sha"][:12]
        assert row["weights"] == f"{run.variant.number}{run.seed}" + "ab" * 3


def test_the_forest_draws_the_interval(table, final):
    charts = study_figures(study_document(table, CONTEXT), study_series(table))
    (chart,) = [chart for chart in charts if chart.name == "forest-parent"]
    (line,) = [
        shape["points"]
        for shape in chart.shapes
        if shape.get("width") == 1.4 and len(shape["points"]) == 2
    ]
    left, right, _, _ = chart.box

    def value(x):
        return chart.x.low + (x - left) / (right - left) * (chart.x.high - chart.x.low)

    values = differences(final, "deep", "wide")
    mean = statistics.fmean(values)
    half = T_4 * statistics.stdev(values) / math.sqrt(len(SEEDS))
    assert [value(x) for x, _ in line] == pytest.approx([mean - half, mean + half], abs=1e-5)
