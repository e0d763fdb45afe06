"""Figures of a study: which there are, their files, and their elements for a web page."""

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import zip_longest

import pytest

from lib.report.figures import PALETTE, Scale, svg_element, write_figures
from lib.report.plots import study_figures, study_series
from lib.report.run_results import read_curves
from lib.report.study import read_study
from lib.runs.record import RunRecord
from lib.runs.run import RunVariant
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import reseal
from tests.lib.report.documents import document_of
from tests.lib.report.fabricated_study import steps, write_study


def figures_of(table):
    return study_figures(document_of(table), study_series(table))


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Six steps with three seeds each."""
    runs = write_study(tmp_path_factory.mktemp("study"), steps(6), 3, iterations=12, documents=5)
    return read_study("demo", runs)


@pytest.fixture(scope="module")
def figures(judged):
    return figures_of(judged)


def test_every_question_has_its_figure_in_the_colours_of_the_page(figures):
    names = ["forest-baseline", "forest-parent", "losses"]
    assert [figure.name for figure in figures] == names
    for figure in figures:
        element = svg_element(figure)
        assert element == svg_element(figure)
        assert ElementTree.fromstring(element).tag.endswith("svg")
        assert "<text" in element and "font-family" not in element
        assert not any(colour in element for colour in PALETTE.values())
        assert "var(--ink)" in element and "metadata" not in element
        (clip,) = re.findall(r'id="([^"]+)"', element)
        assert clip == f"clip-{figure.name}" and f"url(#{clip})" in element
    # A forest has a line per comparison; an inconclusive one a hollow circle and no word.
    text = svg_element(figures[0])
    assert all(f"{i} step-{i}" in text for i in range(1, 6))
    assert len(re.findall(r">[+−]0\.\d{4}( BETTER| WORSE)?<", text)) == 5


@pytest.mark.parametrize(
    ("large", "end"), [([0.2], 0.0108), ([0.2, 0.2], 0.216), ([0.05, 0.035], 0.054)]
)
def test_the_axis_of_a_forest_leaves_out_few_large_differences_only(judged, large, end):
    document = document_of(judged)
    against = [v for v in document["verdicts"] if v["role"] == "baseline"]
    for verdict, size in zip_longest(against, large, fillvalue=0.01):
        verdict |= {"difference": size, "differences": [size], "interval_95": (size, size)}
    forest, *_ = study_figures(document, study_series(judged))
    assert forest.x.high == pytest.approx(end) and forest.x.low == -forest.x.high


@pytest.mark.parametrize(("count", "named"), [(1, False), (4, True), (7, False)])
def test_few_loss_curves_are_named(tmp_path, count, named):
    runs = write_study(tmp_path, steps(count), 1, iterations=12, documents=3)
    drawn = figures_of(read_study("demo", runs))
    (losses,) = [figure for figure in drawn if figure.name == "losses"]
    text = svg_element(losses)
    assert [f"{i} step-{i}</text>" in text for i in range(1, count)] == [named] * (count - 1)
    # In the order of the table, and once.
    labels = re.findall(r">(\d (?:step-\d|baseline))<", text) if named else []
    assert labels == ["0 baseline", "1 step-1", "2 step-2", "3 step-3"][: count * named]
    assert ("stroke-dasharray" in text) == named


@pytest.mark.slow
def test_files_are_written_in_every_format_with_the_same_bytes(figures, tmp_path):
    paths = write_figures(figures[:1], tmp_path / "figures")
    assert [path.name for path in paths] == [f"forest-baseline.{s}" for s in ("pdf", "png", "svg")]
    pdf, png, svg = content = [path.read_bytes() for path in paths]
    assert pdf.startswith(b"%PDF") and png.startswith(b"\x89PNG")
    # 5 inches at 300 dots per inch.
    assert int.from_bytes(png[16:20]) == 1500
    assert b"/CreationDate" not in pdf and b"var(" not in svg
    assert b"<text" in svg and b"step-1" in svg
    # A viewer's dark background does not show through.
    assert svg.count(b'<rect width="100%" height="100%" fill="#fefefe"/>') == 1
    assert [p.read_bytes() for p in write_figures(figures[:1], tmp_path / "figures")] == content


def test_the_curves_show_the_whole_training(tmp_path):
    (run,) = write_study(tmp_path, [RunVariant("run")], 1, iterations=60, documents=3)
    lines = RunDir(run.path).metrics.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    (whole,) = figures_of(read_study("demo", [run]))
    assert whole.x.is_log and whole.y.is_log
    # The first and the largest loss are inside, on both sides of an axis without a gap.
    assert (whole.x.low, whole.x.high) == (1024, 61_440)
    assert (whole.y.low, whole.y.high) == (min(losses), max(losses))
    # An unstable step of the start, which its bin of five iterations averages away.
    (run,) = write_study(tmp_path / "long", [RunVariant("run")], 1, iterations=300, documents=3)
    rows = [json.loads(line) for line in RunDir(run.path).metrics.read_text().splitlines()]
    spike = next(row for row in rows if row["kind"] == "train" and row["iteration"] == 75)
    spike["loss"] = 9.5
    RunDir(run.path).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reseal(RunDir(run.path))
    (whole,) = figures_of(read_study("demo", [run]))
    assert whole.y.high >= 9.5 and "Crosses" in whole.caption


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (Scale(-0.081, 0.081), [-0.05, 0, 0.05]),
        (Scale(0, 61_440), [0, 20_000, 40_000, 60_000]),
        (Scale(2.41, 5.6, True), [3, 4, 5]),
        (Scale(1024, 61_440, True), [3000, 10_000, 30_000]),
        (Scale(1e3, 1e9, True), [10.0**i for i in range(3, 10)]),
        (Scale(2.0, 2.0), [2.0]),
    ],
)
def test_ticks_are_round_and_inside(scale, expected):
    assert scale.ticks() == pytest.approx(expected)
    assert Scale(2, 6).share(3) == 0.25 and Scale(1, 100, True).share(10) == pytest.approx(0.5)
    assert Scale(3, -1).share(0) == 0.75 and Scale(4, 4).share(4) == 0.5


# Series over seeds: means and ranges.


def test_curves_are_means_and_ranges_over_seeds(make_run):
    """Of a baseline with the seeds 1 and 2, and a step with the seeds 2 and 3."""
    drawn = {("base", 1): (9, 7), ("base", 2): (8, 6), ("wide", 3): (5, 5), ("wide", 2): (7, 4)}
    runs = [
        make_run(slug, 3.0 + seed / 100, seed=seed, losses=losses, tokens=60)
        for (slug, seed), losses in drawn.items()
    ]
    base, wide = (row["training"] for row in study_series(read_study("demo", runs)))
    assert base == {"at": [1, 2], "mean": [8.5, 6.5], "low": [8, 6], "high": [9, 7]}
    assert (wide["low"], wide["high"]) == ([5, 4], [7, 5])


def test_the_last_statistics_are_reduced_over_layers(make_run):
    run = RunDir(make_run("wide", 2.9).path)
    assert read_curves(RunRecord(run)).last_statistics == {}
    values = {"gate": [0.0, 1.0, None], "top_max": [1.0]}, {"gate": [0.5, 1], "top_max": [2.0, 4.0]}
    rows = [
        json.dumps({"kind": "statistics", "iteration": i, "tokens": i, "values": each}) + "\n"
        for i, each in enumerate(values, 1)
    ]
    run.metrics.write_text("".join(rows) + run.metrics.read_text())
    reseal(run)
    assert read_curves(RunRecord(run)).last_statistics == {"gate": 0.75, "top_max": 4.0}
