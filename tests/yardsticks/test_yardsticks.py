"""The product of today against figures frozen at commit 478ca248, before it became smaller."""

import csv
import json
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.config.dotconfig import defconfig_layers
from lib.env.gpu import cpu_model
from lib.files import sha256_file
from lib.project import ROOT, python_module_command
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.gpt2.study.large_study import write_large_study
from tests.make_command import make

HERE = Path(__file__).parent
FABRICATED = HERE / "fabricated_study"
RATIO_SMALL = json.loads((HERE / "ratio_small.json").read_text(encoding="utf-8"))
# Words for a reader, which may be phrased better; the numbers and verdicts beside them may not change.
WORDS = {"reason", "remarks"}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Return the results of the RATIO study's 19 steps with five fabricated seeds each."""
    folder = tmp_path_factory.mktemp("yardstick") / "build"
    write_large_study(folder, 5, iterations=120, documents=25)
    command = python_module_command("lib.kablate", "report", "-O", str(folder))
    command += ["--steps", "all", "--seeds", "1-5"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "ALLOW_DIRTY": "y"})
    return folder / "results/ratio"


def table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table.csv."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_table_of_the_fabricated_study_is_the_frozen_one(results):
    frozen, rows = table(FABRICATED / "table.csv"), table(results / "table.csv")
    assert [row["slug"] for row in rows] == [row["slug"] for row in frozen]
    for row, before in zip(rows, frozen, strict=True):
        assert {name: row[name] for name in before} == before


def differences(now: Any, before: Any, place: str = "") -> Iterator[str]:
    """Yield the places where a document differs from the frozen one; numbers may differ in rounding."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() - WORDS):
            yield from differences(now.get(key, "absent"), before[key], f"{place}/{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(now) == len(before):
        for number, pair in enumerate(zip(now, before, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif isinstance(before, float) and isinstance(now, float):
        if not math.isclose(now, before, rel_tol=1e-12, abs_tol=1e-15):
            yield f"{place}: {now} (expected {before})"
    elif now != before:
        yield f"{place}: {now!r} (expected {before!r})"


@pytest.mark.slow
def test_the_verdicts_of_the_fabricated_study_are_the_frozen_ones(results):
    now, frozen = (
        json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
        for folder in (results, FABRICATED)
    )
    for part in ("verdicts", "aa_steps", "family", "metric"):
        assert list(differences(now[part], frozen[part])) == []


@pytest.mark.long
def test_the_small_ratio_study_trains_the_frozen_weights(tmp_path):
    """Equal on processors of the kind that the figures are from; losses to 1e-6 on others."""
    build = write_build(tmp_path, {}, *defconfig_layers(ROOT, RATIO_SMALL["configuration"]))
    done = make(f"O={build}")
    assert done.returncode == 0, done.stderr[-2000:]
    same_kind = cpu_model() == RATIO_SMALL["machine"]["cpu"]
    for slug, frozen in RATIO_SMALL["runs"].items():
        run = RunDir(build / f"results/ratio/{slug}-s1-{frozen['hash8']}")
        loss = json.loads(run.summary.read_text(encoding="utf-8"))["final"]["val_loss"]
        if not same_kind:
            assert loss == pytest.approx(frozen["val_loss"], abs=1e-6), slug
            continue
        now = (loss, *(sha256_file(path) for path in (run.weights, run.metrics, run.per_query)))
        names = ("val_loss", "weights_sha256", "metrics_sha256", "per_query_sha256")
        assert now == tuple(frozen[name] for name in names), slug
