"""Sections below a result table: keys read and gates, speed and memory."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpt2.config import Config
from gpt2.study.document import sections
from gpt2.study.plan import Plan
from lib.files import canonical_json
from lib.report.columns import to_markdown
from lib.report.declarations import VerdictPlan
from lib.report.judge import judge
from lib.report.render import TableSection
from lib.report.study import read_study
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunDir
from tests.gpt2.training.conftest import NSA
from tests.lib.fabricated import reseal
from tests.lib.report.documents import document_of

Configure = Callable[..., Config]


@pytest.fixture
def planned(configure: Configure, train: Callable, tmp_path: Path) -> Callable[..., Plan]:
    """A plan of two finished runs, full attention and native sparse attention."""

    def plan(**settings: Any) -> Plan:
        runs = []
        for slug, given in (("full", {}), ("sparse", NSA)):
            config = configure(**{"MAX_ITERS": 1, **given, **settings})
            path = train(config, slug).files.path
            runs.append(Run("nsa", RunVariant(slug), 1, config, path))
        return Plan("nsa", tmp_path, tmp_path, runs[0].config, runs)

    return plan


def _sections(plan: Plan) -> list[TableSection]:
    study = read_study(plan.study, plan.runs)
    return sections(plan, study, document_of(study)["rows"])


def test_pairs_and_reads_are_listed_if_runs_differ(planned):
    plan = planned()
    (keys,) = _sections(plan)
    # Of 16 tokens: 136 and 227 pairs; 16 keys, and 7 + 12 + 4.
    assert keys.header[:3] == ("run", "pairs", "reads")
    shown = [row[:3] for row in keys.rows]
    assert shown == [("full s1", "8.5", "16"), ("sparse s1", "14.2", "23")]
    assert _sections(replace(plan, runs=plan.runs[:1])) == []


def test_gates_are_those_of_the_last_statistics(planned):
    plan = planned()
    metrics = plan.runs[1].path / "metrics.jsonl"
    for moved in ([0.9, 0.9], [0.25, 0.75, None]):
        values = {"nsa/gate_moved": moved, "other": [1.0]}
        row = {"kind": "statistics", "iteration": 1, "values": values}
        metrics.write_text(metrics.read_text() + canonical_json(row) + "\n")
    reseal(RunDir(plan.runs[1].path))
    (keys,) = _sections(plan)
    moved_at = keys.header.index("gates moved")
    assert [row[moved_at] for row in keys.rows] == ["-", "0.500"]
    assert "Gates: " in keys.note


def test_speed_is_shown_of_combinations(planned):
    plan = planned(TEST_MATRIX_MODE=True, SINGLE_TRAINING=None)
    # Another process, with more memory first and less later.
    step = {"ts": 0.0, "step": 1}
    beats = "".join(
        canonical_json({**step, "mem_reserved_mib": held}) + "\n" for held in (7e6, 1.0)
    )
    (plan.runs[1].path / "heartbeat_rank1.jsonl").write_text(beats)
    speed = _sections(plan)[-1]
    assert speed.title == "Speed"
    timing = json.loads((plan.runs[1].path / "summary.json").read_text())["timing"]
    manifest = json.loads((plan.runs[1].path / "manifest.json").read_text())
    name, step, tokens, held, backend, device, commit = speed.rows[1]
    assert (name, backend) == ("sparse s1", manifest["attention"]["kernel"])
    assert step == f"{1000 * timing['train_seconds']:.1f}"
    assert tokens == f"{timing['tokens_per_second']:,.0f}" and held == "7,000,000"
    assert commit.removesuffix(" edited") == manifest["code"]["git_sha"][:12]
    assert device == manifest["hardware"]["cpu_model"]


def test_a_run_without_a_result_is_left_out(planned):
    plan = planned(TEST_MATRIX_MODE=True, SINGLE_TRAINING=None)
    (plan.runs[1].path / "summary.json").unlink()
    (speed,) = _sections(plan)
    assert [row[0] for row in speed.rows] == ["full s1"]


def test_a_section_is_in_the_text_and_in_the_document():
    part = TableSection(
        "Speed", ("run", "step ms"), [("a", "1.0"), ("b", "20.0")], "By the clock.\n"
    )
    document = document_of(judge([], {}, VerdictPlan()), sections=[asdict(part)])
    expected = "\n## Speed\n\n| run | step ms |\n| --- | ------: |\n| a   |     1.0 |\n"
    text = to_markdown(document)
    assert expected in text and text.endswith("By the clock.\n")
    (section,) = document["sections"]
    assert section["title"] == "Speed" and section["rows"] == [("a", "1.0"), ("b", "20.0")]
