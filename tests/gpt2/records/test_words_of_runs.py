"""A word belongs to the runs that are there: not to another configuration, nor to former losses."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from gpt2.records import commands
from gpt2.running.results import judged_document
from gpt2.study.arguments import asked_tables
from gpt2.study.plan import Plan, config_layers, make_plan
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.errors import ConfigError
from lib.project import ROOT
from lib.report.claims import check_claims, claims_exit_code
from lib.runs.identity import configuration_digest
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.gpt2.study.large_study import this_origin
from tests.lib.fabricated import MANIFEST, changed, reseal
from tests.lib.report.fabricated_study import write_planned
from tests.options import options
from tests.run_command import run_command


@pytest.fixture
def planned(tmp_path) -> Callable[..., Plan]:
    """Return a factory of the plan of three steps and three seeds with these settings."""

    def make(**settings: SymbolValue) -> Plan:
        settings = {"DEVICE_CPU": True, "RA_MLA_ABLATION_STEPS": "0,1,2", **settings}
        layers = defconfig_layers(ROOT, "gpt2-ratio-small")
        write_build(tmp_path, {"VERDICT_AA": False, **settings}, *layers)
        return make_plan(config_layers(tmp_path), tmp_path, seeds="1-3")

    return make


def train(plan: Plan, offset: float) -> None:
    """Write every run of the plan: step k is ``k * offset`` from the baseline, and noise."""
    manifest = changed(MANIFEST, origin=this_origin())
    for run in plan.runs:
        shift = 0.05 * run.seed + offset * (run.variant.number or 0)
        own = {**manifest, "run": {"hash8": run.config.hash8}}
        write_planned(run, 20, 5, symbols=run.config.values, manifest=own, offset=shift)


def judged(plan: Plan, selection: str = "--seeds=1-3") -> tuple[int, str]:
    """Return exit code and text of ``make verdicts``, which writes table and report."""
    return commands.verdicts(options("verdicts", "-O", str(plan.build_dir), selection))


def texts(plan: Plan) -> dict[str, str]:
    names = ("table.md", "table.csv", "verdicts.json", "report.html")
    return {name: (plan.folder / name).read_text() for name in names}


def words(plan: Plan) -> set[str | None]:
    """Return the words of the comparisons with the baseline in the written document."""
    verdicts = json.loads(texts(plan)["verdicts.json"])["verdicts"]
    return {v["verdict"] for v in verdicts if v["role"] == "baseline"}


@pytest.mark.slow
def test_another_configuration_has_no_word_of_the_runs_beside_it(planned, tmp_path):
    first = planned()
    train(first, -0.3)
    assert "BETTER" in judged(first)[1] and words(first) == {"BETTER"}
    other = planned(MAX_ITERS=500)
    assert other.folder == first.folder and not any(run.path.exists() for run in other.runs)
    with pytest.raises(ConfigError) as caught:
        judged(other)
    assert caught.value.problems[0].code == "run.not-found"
    main = texts(other) | {"table.md": texts(other)["table.md"].partition("## Other")[0]}
    assert not any("BETTER" in text or "-0.3" in text for text in main.values())
    assert words(other) <= {None}
    claim = {"name": "it", "text": "it helps", "verdict": "BETTER"}
    for plan, holds in ((first, True), (other, False)):
        document = judged_document(plan)
        entry = {**claim, "contrast": document["verdicts"][0]["name"]}
        content = {"claims": [entry], "path": tmp_path / "claims.toml"}
        (checked,) = check_claims(content, document)
        assert (not checked["problems"]) is holds and (claims_exit_code([checked]) == 0) is holds
    # One run with a result: its comparisons have no word, which is no failure.
    train(replace(other, runs=other.runs[:1]), 0.3)
    code, text = judged(other)
    assert code == 0 and "BETTER" not in text
    train(other, 0.3)
    _, text = judged(other)
    assert "WORSE" in text and "BETTER" not in text and "unplanned look" not in text
    # The first study still has its words; the runs beside it are listed, without one.
    judged(planned())
    assert words(first) == {"BETTER"}
    section = texts(first)["table.md"].partition("## Other configurations")[2]
    for run in other.runs:
        assert run.path.name in section
    assert "MAX_ITERS" in section


@pytest.mark.slow
def test_a_selection_shows_the_words_of_the_whole_study_and_changes_no_file(planned, tmp_path):
    whole = planned()
    train(whole, -0.3)
    # The seeds of a folder are no declared look, which spends alpha; a foreign name adds no seed.
    for name in ("ra-s99999999999999999999-12345678", "ra-s7-12345678", "x-s-"):
        (whole.folder / name).mkdir()
    for words_, seeds in ((), False), (("--seeds=1-3",), True):
        asked = options("report", "-O", str(tmp_path), *words_)
        _, table, selected = asked_tables(asked)
        assert {run.seed for run in table.runs} == {1, 2, 3} and not selected
        commands.report(asked)
        assert (whole.folder / "verdicts.json").exists() == seeds
    before = texts(whole)
    for part in ("--seeds=1", "--steps=0,1"):
        _, text = judged(whole, part)
        assert re.search(r" 3 +[\d.e-]+ +BETTER$", text, re.MULTILINE)
        assert texts(whole) == before
    # The word of a step that is not selected is not shown.
    assert text.count("BETTER") == 1
    lines = (whole.folder / "declarations.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["plan", "look"]


@pytest.mark.slow
def test_named_runs_are_reported_under_the_configuration_that_they_recorded(planned, tmp_path):
    former = planned(VERDICT_AA=True, VERDICT_BAND="0.01")
    train(former, -0.3)
    judged(former)
    verdicts = json.loads(texts(former)["verdicts.json"])["verdicts"]
    # As another version recorded it, with a setting that this one does not have.
    declarations = (former.folder / "declarations.jsonl").read_text()
    for run in former.runs:
        directory, digest = RunDir(run.path), configuration_digest(run.config.identity())
        record = json.loads(directory.resolved_config.read_text())
        record["identity"]["model"]["gone"] = record["symbols"]["COMPILE_BLOCKS"] = True
        directory.resolved_config.write_text(json.dumps(record))
        reseal(directory)
        declarations = declarations.replace(digest, configuration_digest(record["identity"]))
    (former.folder / "declarations.jsonl").write_text(declarations)
    now = planned(MAX_ITERS=500)
    train(now, 0.3)

    def contents():
        return {path: path.read_bytes() for path in former.folder.rglob("*") if path.is_file()}

    before = contents()
    # A part of the former study has the words of the whole.
    paths = [str(run.path) for run in (*former.runs, *now.runs) if run.variant.number != 2]
    command = ("report", "-O", str(tmp_path), "--run")
    code, out, err = run_command(*command, ",".join(paths), "--json")
    assert code == 0, err
    one, *others = json.loads(out)["studies"]
    step = one["rows"][1]["slug"]
    kept = [v for v in verdicts if v["step"] == step and v["reference"] == "baseline"]
    assert (
        one["verdicts"] == kept and kept[0]["verdict"] == "BETTER" and one["rule"]["band"] == 0.01
    )
    assert [(row["control"], row["state"]) for row in one["rows"]] == [
        *[(None, "done")] * 2,
        ("a/a", "done"),
    ]
    # Those of a study that was not judged have their numbers and no word, each alone.
    losses = [RunRecord(RunDir(run.path)).final.val_loss for run in now.runs[::3]]
    assert [len(each["rows"]) for each in others] == [1] * 2
    assert others[0]["rows"][0]["val_loss"] == pytest.approx(fmean(losses))
    assert not any(each["verdicts"] for each in others)
    # The report is elsewhere and leads to the runs.
    (page,) = (tmp_path / "results/named").glob(f"*{former.runs[0].config.hash8}/report.html")
    folder = one["runs"][0]["folder"]
    assert before == contents() and folder in page.read_text()
    assert (page.parent / folder / "logs.txt").is_file()
    for neither in (str(tmp_path / "results"), "no-such-run"):
        code, _, err = run_command(*command, neither)
        assert code == 2 and err.count("[run.not-found]") == 1 and "RUN: " in err, err
