"""Sections below a result table: keys read and gates, speed and memory."""

import shutil
from dataclasses import replace

import pytest

from gpt2.study.document import sections
from gpt2.study.plan import Plan
from lib.files import canonical_json
from lib.report.study import read_study
from lib.runs.record import RunRecord
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunDir
from tests.gpt2.training.conftest import NSA
from tests.lib.fabricated import reseal
from tests.lib.report.documents import document_of


@pytest.fixture(scope="module")
def plan(configure, lasting) -> Plan:
    """A matrix of two finished runs, full attention and native sparse attention."""
    train, runs = lasting(), []
    for slug, given in (("full", {}), ("sparse", NSA)):
        config = configure(**given, MAX_ITERS=1, TEST_MATRIX_MODE=True, SINGLE_TRAINING=None)
        runs.append(Run("nsa", RunVariant(slug), 1, config, train(config, slug).files.path))
    sparse = RunDir(runs[1].path)
    with open(sparse.metrics, "a") as metrics:
        for moved in ([0.9, 0.9], [0.25, 0.75, None]):
            values = {"nsa/gate_moved": moved, "other": [1.0]}
            row = {"kind": "statistics", "iteration": 1, "values": values}
            metrics.write(canonical_json(row) + "\n")
    reseal(sparse)
    # Another process, with more memory first and less later.
    beats = [{"ts": 0.0, "step": 1, "mem_reserved_mib": held} for held in (7e6, 1.0)]
    sparse.heartbeat(1).write_text("".join(canonical_json(beat) + "\n" for beat in beats))
    return Plan("nsa", train.folder, train.folder, runs[0].config, runs)


def _sections(plan):
    study = read_study(plan.study, plan.runs)
    return sections(plan, study, document_of(study)["rows"])


def test_pairs_reads_and_the_last_gates_are_listed_if_runs_differ(plan):
    keys = _sections(plan)[0]
    # Of 16 tokens: 136 and 227 pairs; 16 keys, and 7 + 12 + 4.
    assert keys.header[:3] == ("run", "pairs", "reads")
    shown = [row[:3] for row in keys.rows]
    assert shown == [("full s1", "8.5", "16"), ("sparse s1", "14.2", "23")]
    moved_at = keys.header.index("gates moved")
    assert [row[moved_at] for row in keys.rows] == ["-", "0.500"]
    assert "Gates: " in keys.note
    alone = replace(plan, runs=plan.runs[:1])
    assert [section.title for section in _sections(alone)] == ["Speed"]


def test_speed_is_shown_of_combinations(plan):
    speed = _sections(plan)[-1]
    assert speed.title == "Speed"
    record = RunRecord(RunDir(plan.runs[1].path))
    timing, manifest = record.summary.fields["timing"], record.manifest.fields
    name, step, tokens, held, backend, device, commit = speed.rows[1]
    assert (name, backend) == ("sparse s1", manifest["attention"]["kernel"])
    assert step == f"{1000 * timing['train_seconds']:.1f}"
    assert tokens == f"{timing['tokens_per_second']:,.0f}" and held == "7,000,000"
    assert commit.removesuffix(" edited") == manifest["code"]["git_sha"][:12]
    assert device == manifest["hardware"]["cpu_model"]


def test_a_run_without_a_result_is_left_out(plan, tmp_path):
    full, sparse = plan.runs
    copy = RunDir(shutil.copytree(sparse.path, tmp_path / "sparse"))
    copy.summary.unlink()
    (speed,) = _sections(replace(plan, runs=[full, replace(sparse, path=copy.path)]))
    assert [row[0] for row in speed.rows] == ["full s1"]
