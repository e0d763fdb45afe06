"""Planning a study of many runs: the work for each run is small and does not grow with the others."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpt2.config import identity_digest
from gpt2.planning.plan import config_layers, make_plan
from gpt2.planning.view import look
from lib import json_files
from lib.runs.code import changed_since
from tests.gpt2.planning.large_study import write_large_study


def test_a_plan_reads_three_files_of_each_finished_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_large_study(tmp_path / "large", 2, iterations=2, documents=1)
    reads: Counter[tuple[Path, str]] = Counter()
    read = json_files._read

    def counted(path: Path, *arguments: object) -> bytes:
        reads[path.parent, path.name] += 1
        return read(path, *arguments)

    compared: list[object] = []

    def compare(recorded: Mapping[str, str], commit: str | None) -> list[str]:
        compared.append(recorded)
        return changed_since(recorded, commit)

    monkeypatch.setattr("lib.json_files._read", counted)
    monkeypatch.setattr("lib.runs.code.changed_since", compare)
    layers = config_layers(tmp_path / "large")
    plan = make_plan(layers, tmp_path / "large", steps="all", seeds="1-2")
    views = look(plan)
    assert {view.state for view in views} == {"done"}
    assert {view.seconds_from for view in views} == {"measured"}
    counts = Counter(name for _, name in reads)
    assert counts == dict.fromkeys(("status.json", "summary.json", "manifest.json"), len(views))
    assert set(reads.values()) == {1}
    # All runs were made by the same code.
    assert len(compared) == 1
    # The parts of the digest that the seeds share are formatted once.
    for run in plan.runs:
        assert run.config.digest == identity_digest(run.config.identity())
