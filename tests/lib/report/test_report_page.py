"""The report as a web page: content, escaping, determinism, and what it says with few seeds."""

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lib.plan.designs import OFF, ON
from lib.plan.run import RunVariant
from lib.report.contrast_tests import VerdictRule
from lib.report.html import Html, escape, tag
from lib.report.render import TableSection
from lib.report.report_page import REPORT_FILE, ReportContext, report_page, write_report
from lib.report.study_verdicts import VerdictPlan
from lib.report.table import build_table
from lib.report.verdicts import VerdictWord
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import MANIFEST, changed, seal
from tests.lib.report.fabricated_study import renamed, steps, write_study

CONTEXT = ReportContext(
    "Study demo",
    ["Trained: models."],
    {"baseline": 6e6, "step-1": 7e6, "step-2": 6e6},
    [("MAX_ITERS", "120", "defconfig")],
    [("make report", "this report again")],
)
VOID = {"meta", "path", "use", "br"}


class Parsed(HTMLParser):
    """Elements, attributes and text of a document; unbalanced elements are a failure."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += attributes
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.tags.append(name)
        self.attributes += attributes

    def handle_endtag(self, name):
        if name not in VOID:
            assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        skipped = Counter(self.tags)
        assert skipped["script"] == skipped["style"] == 1
        return " ".join(self.texts)

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Three steps with three seeds each, and their table."""
    folder = tmp_path_factory.mktemp("study")
    runs = write_study(folder, steps(3), 3, iterations=30, documents=6)
    return runs, build_table("demo", runs)


@pytest.fixture(scope="module")
def page(study):
    return report_page(study[1], CONTEXT)


@pytest.fixture(scope="module")
def parsed(page):
    return Parsed(page)


def test_every_run_step_and_comparison_is_named(study, parsed):
    runs, table = study
    assert all(run.path.name in parsed.text for run in runs)
    words = parsed.values("data-word")
    assert len(words) == len(table.verdicts.verdicts) == 2
    given = [verdict.word.value for verdict in table.verdicts.verdicts]
    assert [word.split()[0] for word in words] == given
    for title in ("Question", "Findings", "Verdicts", "Results", "Training", "Cost", "Steps"):
        assert title in parsed.texts
    for title in ("Documents", "Mechanisms", "Fairness", "Samples", "Provenance", "Reproduce"):
        assert title in parsed.texts
    assert "make report" in parsed.texts and "Trained: models." in parsed.texts


def test_a_loss_names_its_runs(study, parsed):
    _, table = study
    (title,) = [t for t in parsed.values("title") if "seed 1: " in t and "step-1-s1" in t]
    assert title.count("\n") == 2 and MANIFEST["code"]["git_sha"][:12] in title
    loss = table.rows[1].val_loss.mean
    assert repr(loss) in parsed.values("data-v")
    anchors = [value for value in parsed.values("href") if value.startswith("#run-")]
    assert set(anchors) <= {f"#{value}" for value in parsed.values("id")}


def test_nothing_is_loaded_from_elsewhere(parsed):
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(parsed.tags)
    assert parsed.values("src") == []
    links = [*parsed.values("href"), *parsed.values("xlink:href")]
    assert links and all(link.startswith("#") for link in links)
    (policy,) = [value for value in parsed.values("content") if "default-src" in value]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert not any(
        "url(" in (value or "") and "url(#" not in value for _, value in parsed.attributes
    )
    assert "@import" not in parsed.text and "url(" not in parsed.text


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(study, page, tmp_path):
    runs, _ = study
    again = report_page(build_table("demo", list(reversed(runs))), CONTEXT)
    assert len(again) > 1000
    path = write_report(build_table("demo", runs), CONTEXT, tmp_path)
    assert path.name == REPORT_FILE and path.read_text() == page
    assert list(tmp_path.iterdir()) == [path]


HOSTILE = "</title><script>alert(1)</script><b onclick='x' title=\"y\">&amp;\x00\u202e"


def test_values_of_a_run_are_never_markup(tmp_path):
    runs = write_study(tmp_path, steps(2), 1, iterations=12, documents=3)
    hostile = [renamed(run, title=HOSTILE) for run in runs]
    for run in hostile:
        directory = RunDir(run.path)
        directory.sample.write_text(HOSTILE)
        seal(directory, changed(MANIFEST, origin__device=HOSTILE, code__git_sha=HOSTILE))
    broken = renamed(hostile[1], slug="broken", parent="baseline")
    broken = replace(broken, path=tmp_path / "demo" / HOSTILE.replace("/", "_").replace("\0", ""))
    write = RunDir(broken.path)
    broken.path.mkdir()
    write_status(write, RunStatus(State.FAILED, 1, HOSTILE))
    context = replace(
        CONTEXT,
        title=HOSTILE,
        question=[HOSTILE],
        settings=[(HOSTILE, HOSTILE, HOSTILE)],
        commands=[(HOSTILE, HOSTILE)],
        other_folders=[(HOSTILE, HOSTILE)],
    )
    section = TableSection(HOSTILE, (HOSTILE,), [(HOSTILE,)], HOSTILE)
    table = replace(build_table("demo", [*hostile, broken], left_out=[HOSTILE]), sections=[section])
    page = report_page(table, context)
    parsed = Parsed(page)
    assert parsed.tags.count("script") == 1 and not parsed.values("onclick")
    assert "<b onclick" not in page and "\x00" not in page and "\u202e" not in page
    # Title, heading, question, settings, commands, folder, section, reason, devices, samples.
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 15


def test_text_is_escaped_and_markup_is_not():
    assert escape("<a b='c'>&") == "&lt;a b=&#x27;c&#x27;&gt;&amp;"
    assert escape(Html("<b>")) == "<b>"
    assert tag("p", "<", tag("b", "x"), class_='"') == '<p class="&quot;">&lt;<b>x</b></p>'


def test_one_seed_gives_a_loud_notice_and_no_verdict(tmp_path):
    runs = write_study(tmp_path, steps(3), 1, iterations=12, documents=3)
    parsed = Parsed(report_page(build_table("demo", runs), CONTEXT))
    assert "notice" in parsed.values("class") and "One seed gives no verdict." in parsed.texts
    assert "SEEDS=1,2,3" in parsed.text and parsed.values("data-word") == ["-", "-"]
    for word in ("BETTER", "WORSE", "EQUIVALENT"):
        assert word not in parsed.text


def test_three_seeds_give_no_notice(parsed):
    assert "notice" not in parsed.values("class")


def test_damaged_and_excluded_runs_are_named(tmp_path):
    runs = write_study(tmp_path, steps(3), 1, iterations=12, documents=3)
    RunDir(runs[1].path).status.write_text("{")
    RunDir(runs[2].path).summary.write_text("{}")
    (tmp_path / "demo" / "odd").mkdir()
    context = replace(CONTEXT, other_folders=[("odd", "not a run")])
    parsed = Parsed(report_page(build_table("demo", runs), context))
    assert "Missing runs and notes" in parsed.texts and "odd" in parsed.texts
    names = Counter(parsed.texts)
    for run in runs[1:]:
        # In the list of missing runs, and in the provenance.
        assert names[run.path.name] == 2
    assert "damaged" in parsed.texts


def test_without_results_the_report_still_appears(make_run):
    table = build_table("demo", [make_run("base"), make_run("wide", parent="base")])
    parsed = Parsed(report_page(table, CONTEXT))
    assert "svg" not in parsed.tags and "new" in parsed.texts


def test_a_step_that_differs_by_rounding_has_no_p(make_run):
    losses = {"base": (3.0, 3.1, 3.2), "same": (3.0 + 2e-8, 3.1 - 1e-8, 3.2 + 3e-8)}
    runs = [
        make_run(name, loss, seed=seed, parent="base" if number else "", number=number)
        for number, name in enumerate(losses)
        for seed, loss in enumerate(losses[name], 1)
    ]
    table = build_table("demo", runs, verdict_plan=VerdictPlan(VerdictRule(band=0.01)))
    text = " ".join(Parsed(report_page(table, CONTEXT)).texts)
    assert "EQUIVALENT" in text and "rounding" in text and "p=-" not in text


def test_without_matplotlib_a_line_names_the_command(study, without_matplotlib):
    parsed = Parsed(report_page(study[1], CONTEXT))
    assert "svg" not in parsed.tags and len(parsed.values("data-word")) == 2
    assert "matplotlib" in parsed.text and "make setup" in parsed.text


def test_a_single_training_compares_nothing(tmp_path):
    runs = write_study(tmp_path, [RunVariant("run")], 1, iterations=12, documents=3)
    parsed = Parsed(report_page(build_table("single", runs), CONTEXT))
    assert parsed.values("data-word") == [] and "Nothing is compared." in parsed.texts
    assert "notice" not in parsed.values("class") and "Loss over training" in parsed.values(
        "aria-label"
    )


@pytest.mark.slow
def test_combinations_have_marginal_means_and_no_tree(tmp_path):
    levels = [{"A": a, "B": b} for a in ("x", "y") for b in ("1", "2")]
    cells = [
        RunVariant("-".join(level.values()), number=i, levels=level)
        for i, level in enumerate(levels)
    ]
    runs = write_study(tmp_path, cells, 3, iterations=12, documents=3)
    parsed = Parsed(report_page(build_table("matrix", runs), CONTEXT))
    assert "Marginal means" in parsed.texts and "Steps" not in parsed.texts
    # There is no parent to compare with.
    assert any("compared with the first one" in text for text in parsed.texts)
    assert len(parsed.values("data-word")) == len(build_table("matrix", runs).verdicts.verdicts)


@pytest.mark.slow
def test_a_factorial_design_has_its_effects(tmp_path):
    levels = [{"A": a, "B": b} for a in (OFF, ON) for b in (OFF, ON)]
    cells = [RunVariant(f"cell-{i}", number=i, levels=level) for i, level in enumerate(levels)]
    runs = write_study(tmp_path, cells, 3, iterations=12, documents=3)
    plan = VerdictPlan(VerdictRule("factorial"), interactions=True)
    table = build_table("matrix", runs, verdict_plan=plan)
    parsed = Parsed(report_page(table, CONTEXT))
    names = {verdict.contrast.step for verdict in table.verdicts.verdicts}
    assert len(parsed.values("data-word")) == len(names) == 3 and names <= set(parsed.texts)
    assert "Effects of the design" in parsed.values("aria-label")


@pytest.mark.slow
def test_runs_under_a_label_are_compared_within_themselves(tmp_path):
    variants = steps(2)
    runs = write_study(tmp_path, variants, 2, iterations=12, documents=3)
    for run in runs:
        if run.seed == 2:
            seal(RunDir(run.path), changed(MANIFEST, origin__torch="2.12.0"))
    table = build_table("demo", runs, label_by=["torch"])
    titles = Parsed(report_page(table, CONTEXT)).values("aria-label")
    titles = [label for label in titles if "minus the baseline" in label]
    assert len(titles) == 2 and "2.12.0:step-1" in titles[1]


@pytest.mark.slow
def test_an_aa_step_is_shown_apart_and_a_failed_one_loudly(tmp_path):
    variants = [*steps(2), RunVariant("aa", "A/A", parent="baseline", is_aa=True)]
    runs = write_study(tmp_path, variants, 3, iterations=12, documents=3)
    table = build_table("demo", runs)
    parsed = Parsed(report_page(table, CONTEXT))
    words = parsed.values("data-word")
    assert len(words) == 2 and words[-1].startswith("A/A step")
    failed = replace(table.verdicts.aa_steps[0], word=VerdictWord.WORSE)
    verdicts = replace(table.verdicts, aa_steps=[failed])
    parsed = Parsed(report_page(replace(table, verdicts=verdicts), CONTEXT))
    assert parsed.values("data-word")[-1] == "A/A step failed"
    assert "notice" in parsed.values("class")


def test_a_changed_rule_is_stated(study):
    runs, _ = study
    former = {"rule": {"band": 1.0}, "verdicts": {}}
    table = build_table("demo", runs, verdict_plan=VerdictPlan(former=(former,)))
    assert "rule changed after results" in Parsed(report_page(table, CONTEXT)).text


@pytest.mark.slow
def test_a_study_of_19_steps_and_8_seeds_stays_small(tmp_path: Path):
    runs = write_study(tmp_path, steps(19), 2, iterations=12, documents=3)
    page = report_page(build_table("demo", runs), CONTEXT)
    assert len(page.encode()) < 3_000_000
    assert len(Parsed(page).values("data-word")) == 24
