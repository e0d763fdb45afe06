"""The report as a web page: content, escaping, determinism, and what it says with few seeds."""

import base64
import hashlib
import json
import math
import re
import statistics
from collections import Counter

import pytest

from lib.report.columns import VERDICTS, columns, grid, rows_of, verdicts_of
from lib.report.declarations import VerdictPlan
from lib.report.figures import MARKS
from lib.report.page import report_page
from lib.report.plots import study_figures, study_series
from lib.report.statistics import VerdictRule
from lib.report.study import read_study
from lib.report.text import answer, best_verdict, notices
from lib.report.verdicts import VerdictWord
from lib.runs.run import OFF, ON, RunVariant
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST
from tests.lib.report.documents import document_of
from tests.lib.report.fabricated_study import steps, write_study
from tests.lib.report.web_page import CONTEXT, Parsed, page_of


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Three steps with three seeds each, and their table."""
    folder = tmp_path_factory.mktemp("study")
    runs = write_study(folder, steps(3), 3, iterations=30, documents=6)
    return runs, read_study("demo", runs)


@pytest.fixture(scope="module")
def page(study):
    return page_of(study[1])


@pytest.fixture(scope="module")
def parsed(page):
    return Parsed(page)


def final_of(run):
    return json.loads(RunDir(run.path).summary.read_text())["final"]


def test_every_run_step_and_comparison_is_named(study, parsed):
    runs, table = study
    shown = {line["run"]: line for line in parsed.tables["Runs"]}
    # By step, then by seed.
    assert list(shown) == [run.path.name for first in range(3) for run in runs[first::3]]
    for run in runs:
        line = [shown[run.path.name][name] for name in ("val loss", "seed", "config", "state")]
        loss = f"{final_of(run)['val_loss']:.6f}"
        assert line == [loss, str(run.seed), run.config.hash8, "done"]
        assert shown[run.path.name]["commit"] == MANIFEST["code"]["git_sha"][:12]
    given = [verdict["verdict"] for verdict in table.judged["verdicts"]]
    assert [word.split()[0] for word in parsed.words] == given and len(given) == 2
    titles = ["Question", "Answer", "Verdicts", "Losses", "Training", "Samples", "Reproduce"]
    assert {*titles, "What differed", "make report", "Planned: models."} <= set(parsed.texts)
    # The change of each step, as settings.
    assert parsed.texts.count("DROPOUT=0.1") == 2


def test_a_number_opens_its_runs(study, parsed):
    runs, _ = study
    buttons = parsed.values("popovertarget")
    # Three losses and two differences.
    assert len(buttons) == len(set(buttons)) == 5 and set(buttons) == parsed.sources.keys()
    (text,) = [text for text in parsed.sources.values() if text.startswith("step-1seed 1")]
    assert MANIFEST["code"]["git_sha"][:12] in text
    for run in runs[1::3]:
        assert f"seed {run.seed}: {final_of(run)['val_loss']:.4f} {run.path.name}" in text
    anchors = {value for value in parsed.values("href") if value.startswith("#run-")}
    assert anchors == {f"#run-{i}" for i in range(len(runs))}
    ids = parsed.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in parsed.values("href") if link[0] == "#"} <= set(ids)


def test_tables_have_the_texts_of_the_columns(study, parsed):
    document = document_of(study[1], **CONTEXT)
    for title, shown, rows in (
        ("Losses", columns(document), rows_of(document)),
        ("Verdicts", VERDICTS, verdicts_of(document)),
    ):
        filled, lines = grid(shown, rows)
        table = [dict(zip((c.heading for c in filled), line, strict=True)) for line in lines]
        for row, found in zip(table, parsed.tables[title], strict=True):
            texts = {key: text.replace("-", "−") for key, text in row.items()}
            # A minus sign in numbers only, and no dash for a missing one.
            names = {key: row[key] for key in ("step", "against") if key in row}
            assert found == {k: "" if t == "−" else t for k, t in (texts | names).items()}


def test_the_runs_of_a_difference_and_the_interval_that_the_forest_draws(study, parsed):
    base, ours = ([final_of(run)["val_loss"] for run in study[0][first::3]] for first in (0, 1))
    (text,) = [text for text in parsed.sources.values() if text.startswith("step-1 vs baseline")]
    assert "seeds 1–3" in text
    for losses in (ours, base):
        assert ", ".join(f"{loss:.4f}" for loss in losses) in text.replace(" ,", ",")
    values = [a - b for a, b in zip(ours, base, strict=True)]
    shown = text.replace("−", "-").partition("differences: ")[2].split(", ")
    assert [*map(float, shown)] == pytest.approx(values, abs=5.1e-5)
    forest, *_ = study_figures(document_of(study[1]), study_series(study[1]))
    line = next(each["points"] for each in forest.shapes if each.get("width") == 1.4)
    left, right, _, _ = forest.box
    width = (forest.x.high - forest.x.low) / (right - left)
    # The 97.5 % quantile of Student's t with 2 degrees of freedom, from a printed table.
    half = 4.303 * statistics.stdev(values) / math.sqrt(3)
    expected = [statistics.fmean(values) - half, statistics.fmean(values) + half]
    ends = [forest.x.low + (x - left) * width for x, _ in line]
    assert ends == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_nothing_is_loaded_from_elsewhere_and_only_its_script_runs(page, parsed):
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(parsed.tags)
    assert parsed.values("src") == []
    links = {*parsed.values("href"), *parsed.values("xlink:href")}
    # The log of each run, beside the page.
    logs = {f"{line['run']}/logs.txt" for line in parsed.tables["Runs"]}
    assert logs < links and all(link.startswith("#") for link in links - logs)
    (policy,) = [value for value in parsed.values("content") if "default-src" in value]
    assert "default-src 'none'" in policy
    assert not any(
        "url(" in (value or "") and "url(#" not in value for _, value in parsed.attributes
    )
    assert "@import" not in parsed.text and "url(" not in parsed.text
    # A browser runs a script only if the digest of its bytes is the one in the policy.
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "beforeprint" in script and f"script-src 'sha256-{digest}'" in policy


def every_text(value, replaced):
    """Return the value with every text of it replaced, keys of dictionaries included."""
    if isinstance(value, str):
        return replaced(value)
    if isinstance(value, dict):
        return {key: every_text(each, replaced) for key, each in value.items()}
    return [every_text(each, replaced) for each in value] if isinstance(value, list) else value


def test_no_text_of_a_document_is_markup(study):
    """Every text of document and series, whatever field it is."""
    table = study[1]
    words = {word.value for word in VerdictWord} | {"baseline", "parent", "both", "shared", "done"}
    texts = Counter()

    def hostile(text):
        texts[text] += 1
        return text if text in words else f"<i>{text}\x00\u202e</i>"

    document = every_text(json.loads(json.dumps(document_of(table, **CONTEXT))), hostile)
    series = every_text(json.loads(json.dumps(study_series(table))), hostile)
    page = report_page(document, series)
    assert len(texts) > 60 and page.count("&lt;i&gt;") > 100
    assert "<i>" not in page and "i" not in Parsed(page).tags
    assert "\x00" not in page and "\u202e" not in page


def test_one_seed_has_losses_first_and_one_line_on_what_is_missing(tmp_path):
    runs = write_study(tmp_path, steps(3), 1, iterations=12, documents=3)
    parsed = Parsed(page_of(read_study("demo", runs)))
    assert parsed.answer.startswith("n=1: no verdict") and "SEEDS=1-3" in parsed.answer
    assert parsed.words == [] and "Verdicts" not in parsed.tables
    assert next(iter(parsed.tables)) == "Losses" and len(parsed.tables["Losses"]) == 3
    assert "-" not in [cell for line in parsed.tables["Losses"] for cell in line.values()]
    assert not any(word.value in parsed.text for word in VerdictWord)


def judged(study, *words, **fields):
    """Return the document of the study with other words of its comparisons with the baseline."""
    document = document_of(study[1])
    for verdict, word in zip(document["verdicts"], words, strict=True):
        verdict.update(verdict=word, difference={"BETTER": -0.5, "WORSE": 0.25}.get(word, 0.1))
        verdict.update(interval_95=[verdict["difference"] - 0.1, verdict["difference"] + 0.1])
    return document | fields


DIFFERENCES = {
    "BETTER": "−0.5000 nats per token (95 % interval −0.6000 to −0.4000)",
    "WORSE": "+0.2500 nats per token (95 % interval +0.1500 to +0.3500)",
}
LARGEST = "the largest difference is that of"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("BETTER", "WORSE"),
            "Of 2 steps, 1 is better than the baseline and 1 is worse; "
            f"{LARGEST} step-1: {DIFFERENCES['BETTER']}.",
        ),
        (
            ("INCONCLUSIVE", "WORSE"),
            "Of 2 steps, 1 is worse than the baseline and 1 is undecided; "
            f"{LARGEST} step-2: {DIFFERENCES['WORSE']}.",
        ),
        (
            ("EQUIVALENT", "DIVERGED"),
            "Of 2 steps, none is shown to be better or worse than the baseline, 1 is equivalent and 1 "
            "diverged.",
        ),
        ((None, None), "2 comparisons without a word: because."),
    ],
)
def test_the_answer_is_one_sentence(study, words, expected):
    document = judged(study, *words)
    for verdict in document["verdicts"]:
        verdict["reason"] = "because"
    assert answer(document) == expected


@pytest.mark.parametrize(
    ("word", "gated", "p", "expected"),
    [
        ("BETTER", False, 0.004, f"better than baseline: {DIFFERENCES['BETTER']}, n=3, p=0.004."),
        # The rule shared records a p that no test gave, if the own interval contains 0.
        (
            *("INCONCLUSIVE", True, 1.0),
            f"not shown to differ from baseline: {DIFFERENCES['BETTER']}, n=3.",
        ),
        (
            *("EQUIVALENT", None, None),
            "equivalent to baseline: +0.0000 nats per token, which is rounding, n=3.",
        ),
    ],
)
def test_one_step_is_answered_by_its_difference(study, word, gated, p, expected):
    document = judged(study, "BETTER", None)
    del document["verdicts"][1]
    document["verdicts"][0] |= {"verdict": word, "gated": gated, "p_of_word": p}
    if p is None:
        rounding = {"difference": 0.0, "rounding_only": True, "interval_95": None}
        document["verdicts"][0] |= rounding
    assert answer(document) == f"step-1 is {expected}"
    # Also a difference of 0 has its word in the index.
    assert best_verdict(document) is document["verdicts"][0]


def test_losses_are_in_the_unit_of_the_document(study):
    document = judged(study, "BETTER", "WORSE", unit="bits per byte")
    parsed = Parsed(report_page(document, study_series(study[1])))
    assert "−0.5000 bits per byte" in parsed.answer
    assert any("lower loss · bits per byte" in text for text in parsed.texts)
    # Training losses remain in nats per token, and no other loss is drawn beside them.
    for unit, dots in (("bits per byte", False), ("nats per token", True)):
        charts = study_figures({**document, "unit": unit}, study_series(study[1]))
        (losses,) = [chart for chart in charts if chart.name == "losses"]
        assert any(shape["layer"] == MARKS for shape in losses.shapes) == dots
    (caption,) = [text for text in parsed.texts if text.startswith("Training loss, mean")]
    assert "nats per token" in caption and "validation" not in caption


def test_failures_are_said_before_the_words(study):
    document = judged(study, "BETTER", None, aa_failed=True)
    document["verdicts"][1]["reason"] = "the look waits"
    for run in document["runs"][:2]:
        run["unstable"] = True
    document["runs"][4]["diverged"] = True
    assert notices(document) == [
        "Diverged training: step-1 (seed 2).",
        "Unstable training: baseline (seeds 1–2).",
        "1 comparison without a word: the look waits.",
        "A/A step failed at an earlier look.",
    ]


def test_without_results_or_a_comparison_the_report_still_appears(make_run, tmp_path):
    table = read_study("demo", [make_run("base"), make_run("wide", parent="base")])
    parsed = Parsed(page_of(table))
    assert "svg" not in parsed.tags and "new" in parsed.texts
    assert parsed.answer == "No run has a result yet."
    runs = write_study(tmp_path, [RunVariant("run")], 1, iterations=12, documents=3)
    parsed = Parsed(page_of(read_study("single", runs)))
    assert parsed.words == [] and parsed.answer.endswith("nothing is compared.")
    assert "notice" not in parsed.values("class")
    assert "Loss over training" in parsed.values("aria-label")


def test_a_run_has_its_machine_its_branch_and_its_log(make_run):
    on_gpus = {
        "code__branch": "a-topic",
        "hardware__cuda_version": "12.8",
        "processes": {"world_size": 2, "backend": "nccl"},
        "final_weights_digest": "0123456789ab",
    }
    runs = [make_run("base", 3.0, manifest=on_gpus), make_run("base", 3.0, seed=2)]
    for run, shown in zip(
        runs,
        (
            ["2.13.0, CUDA 12.8", "2 x a cpu", "000000000000 on a-topic", "01234567"],
            ["2.13.0", "a cpu", "0" * 12, "unknown"],
        ),
        strict=True,
    ):
        (line,) = (parsed := Parsed(page_of(read_study("demo", [run])))).tables["Runs"]
        assert [line[name] for name in ("torch", "device", "commit", "weights")] == shown
        assert f"{line['run']}/logs.txt" in parsed.values("href")


def test_a_factorial_design_has_its_effects(tmp_path):
    levels = [{"A": a, "B": b} for a in (OFF, ON) for b in (OFF, ON)]
    cells = [RunVariant(f"cell-{i}", number=i, levels=level) for i, level in enumerate(levels)]
    runs = write_study(tmp_path, cells, 3, iterations=12, documents=3)
    plan = VerdictPlan(VerdictRule("factorial"), interactions=True)
    parsed = Parsed(page_of(read_study("matrix", runs, plan=plan)))
    assert len(parsed.words) == 3 and {"A A", "B B", "AB"} <= set(parsed.texts)
    assert "Effects of the design" in parsed.values("aria-label")
    # An effect has no reference, and a combination no parent.
    assert "against" not in parsed.tables["Verdicts"][0] and "tree" not in parsed.values("class")
    parsed = Parsed(page_of(read_study("matrix", runs)))
    assert any("compared with the first one" in text for text in parsed.texts)
    assert len(parsed.words) == 3 and "Δ first row" in parsed.tables["Losses"][0]


def test_a_remark_is_listed_once_and_repeats_no_column(study):
    document = document_of(study[1])
    for verdict in document["verdicts"]:
        # The comparison's own interval contains 0: the column p says so.
        verdict |= {"verdict": "INCONCLUSIVE", "interval_95": [-0.1, 0.1], "p": 1.0, "p_own": 0.4}
        verdict |= {"reason": "needs about 7 more seeds", "more_seeds": 7, "remarks": ["<noted>"]}
    page = report_page(document, study_series(study[1]))
    rows = Parsed(page).tables["Verdicts"]
    assert {row["p"] for row in rows} == {"own 0.4"} and "needs about 7" not in page
    assert page.count("&lt;noted&gt; (all)") == 1


def test_text_of_axes_is_readable_on_a_phone(page):
    """At 390 pixels, a figure is 366 wide; the font is in its units."""
    for part in page.split("<svg ")[1:]:
        width = float(part.partition('viewBox="0 0 ')[2].partition(" ")[0])
        size = float(part.partition('font-size="')[2].partition('"')[0])
        assert size * 366 / width >= 9
