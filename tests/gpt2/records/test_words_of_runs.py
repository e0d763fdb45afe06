"""A word belongs to the runs that are there: not to another configuration, nor to former losses."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2.running import results
from gpt2.study.document import study_document_of
from gpt2.study.plan import Plan, config_layers, make_plan, table_plan
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.errors import ConfigError
from lib.project import ROOT
from lib.report.claims import check_claims, claims_exit_code
from tests.build_folder import write_build
from tests.gpt2.study.large_study import this_origin
from tests.lib.fabricated import MANIFEST, changed
from tests.lib.report.fabricated_study import write_planned

STEPS, SEEDS = "0,1,2", "1-3"


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """Return a factory of the plan of three steps and three seeds with these settings."""

    def make(seeds: str = SEEDS, steps: str = "", **settings: SymbolValue) -> Plan:
        settings = {"DEVICE_CPU": True, "RA_MLA_ABLATION_STEPS": STEPS, **settings}
        layers = defconfig_layers(ROOT, "gpt2-ratio-small")
        write_build(tmp_path, {**settings, "VERDICT_AA": False}, *layers)
        return make_plan(config_layers(tmp_path), tmp_path, seeds=seeds, steps=steps)

    return make


def train(plan: Plan, offset: float, *, started_at: float = 1.5) -> None:
    """Write every run of the plan: step k is ``k * offset`` from the baseline, and noise."""
    origin = this_origin()
    for run in plan.runs:
        shift = 0.05 * run.seed + offset * (run.variant.number or 0)
        manifest = changed(MANIFEST, origin=origin)
        manifest["volatile"]["attempts"] = [{"state": "SUCCESS", "started_at": started_at}]
        own = {**manifest, "run": {"hash8": run.config.hash8}}
        write_planned(run, 60, 10, symbols=run.config.values, manifest=own, offset=shift)


def judged(plan: Plan) -> tuple[int, str]:
    """Return exit code and text of ``make verdicts``, which writes table and report."""
    return results.verdicts(plan, table_plan(plan), selected=False)


def words(plan: Plan) -> dict[str, str | None]:
    """Return step → word of the comparisons with the baseline in the document."""
    verdicts = json.loads((plan.folder / "verdicts.json").read_text())["verdicts"]
    return {v["step"]: v["verdict"] for v in verdicts if v["role"] == "baseline"}


def test_a_study_that_was_not_trained_has_no_word_of_another_configuration(planned, tmp_path):
    short = planned()
    train(short, -0.3)
    assert "BETTER" in judged(short)[1] and set(words(short).values()) == {"BETTER"}
    long = planned(MAX_ITERS=500, LEARNING_RATE="1e-4")
    assert long.folder == short.folder and not any(run.path.exists() for run in long.runs)
    with pytest.raises(ConfigError) as caught:
        judged(long)
    assert caught.value.problems[0].code == "run.not-found"
    shown = "".join(
        (long.folder / name).read_text() for name in ("table.md", "table.csv", "report.html")
    )
    assert "BETTER" not in shown and "-0.3" not in shown
    assert set(words(long).values()) <= {None}
    table = results.judged_study(long)
    assert all(verdict["verdict"] is None for verdict in table.judged["verdicts"])
    claim = {"name": "it", "text": "it helps", "verdict": "BETTER"}
    for plan, holds in ((short, True), (long, False)):
        document = study_document_of(plan, results.judged_study(plan))
        contrast = document["verdicts"][0]["name"]
        (checked,) = check_claims(
            {"claims": [{**claim, "contrast": contrast}], "path": tmp_path / "claims.toml"},
            document,
        )
        assert (not checked["problems"]) is holds and (claims_exit_code([checked]) == 0) is holds
    # The trained study still has its words.
    judged(planned())
    assert set(words(short).values()) == {"BETTER"}


def test_runs_that_were_trained_again_have_the_word_of_their_losses(planned):
    first = planned()
    train(first, -0.3)
    judged(first)
    assert set(words(first).values()) == {"BETTER"}
    # As far as the seeds of the baseline.
    train(first, 0.0, started_at=4e9)
    _, text = judged(first)
    assert "BETTER" not in text and "BETTER" not in (first.folder / "table.md").read_text()
    assert "trained again since" in text


def test_a_selection_shows_the_words_of_the_whole_study(planned):
    whole = planned()
    train(whole, -0.3)
    judged(whole)
    for part in (planned(seeds="1"), planned(steps="0,1")):
        shown = table_plan(part)
        _, text = results.verdicts(part, shown, selected=True)
        assert re.search(r" 3 +[\d.e-]+ +BETTER$", text, re.MULTILINE)
    # The word of a step that is not selected is not shown.
    assert text.count("BETTER") == 1
    lines = (whole.folder / "declarations.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["plan", "look"]


def test_another_split_of_the_data_is_another_study(planned):
    first = planned()
    train(first, -0.3)
    judged(first)
    other = planned(VAL_FRACTION="0.2")
    assert other.folder == first.folder and other.runs[0].path != first.runs[0].path
    # One run with a result: its comparisons have no word, which is no failure.
    train(replace(other, runs=other.runs[:1]), 0.3)
    code, text = judged(other)
    assert code == 0 and "BETTER" not in text
    train(other, 0.3)
    _, text = judged(other)
    assert "WORSE" in text and "BETTER" not in text and "unplanned look" not in text


def test_runs_of_other_configurations_are_listed_for_the_whole_study_only(planned):
    train(planned(VAL_FRACTION="0.2"), 0.3)
    first = planned()
    train(first, -0.3)
    one = planned(steps="0,1")
    whole = table_plan(one)
    document = json.loads(results.report(one, whole, selected=True, json=True))
    assert "Other configurations" not in [section["title"] for section in document["sections"]]
    assert "## Other configurations" in (first.folder / "table.md").read_text()
