"""The run commands end to end: real training of a very small model on a few files of text."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpt2.data.prepare import prepare
from gpt2.planning import config_layers, make_plan
from lib.binding import Value
from lib.kconfig import Layer, Tree
from lib.project import ROOT
from lib.rundir import RunDir
from lib.status import State, read_status

SMALL: dict[str, Value] = {
    "DEVICE_CPU": True,
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 2,
    "N_HEAD": 2,
    "N_EMBD": 96,
    "BLOCK_SIZE": 16,
    "TOKENIZER_BYTE": True,
    "DATASET_CUSTOM": True,
    "CUSTOM_PATH": "text",
    "VAL_FRACTION": "0.4",
    "EVAL_TOKENS": 64,
    "GLOBAL_BATCH": 4,
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 2,
    "MAX_ITERS": 4,
    "WARMUP_STEPS": 1,
    "DROPOUT": "0.1",
    "SAMPLE_TOKENS": 8,
    "RA_MLA_ABLATION_MODE": True,
}


@dataclass
class Folder:
    """A build folder with a configuration and prepared data."""

    path: Path

    def command(self, script: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Run a command line of the tree: exit code, stdout, stderr."""
        environment = {k: v for k, v in os.environ.items() if k not in ("V", "JSON", "STEPS")}
        done = subprocess.run(
            [sys.executable, str(ROOT / script), "-O", str(self.path), *arguments],
            capture_output=True,
            text=True,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    def runs(self, steps: str) -> list[Path]:
        """The run directories of some steps."""
        plan = make_plan(config_layers(self.path), self.path, steps=steps)
        return [run.path for run in plan.runs]


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Folder]:
    def make(**settings: Value | None) -> Folder:
        (tmp_path / "text").mkdir()
        for i in range(12):
            (tmp_path / f"text/{i}.txt").write_text(f"{i} makes {i * i}, as anybody knows. " * 9)
        given = {k: v for k, v in {**SMALL, **settings}.items() if v is not None}
        config = Layer.of("defconfig", "test", given)
        Tree().write_config([config], tmp_path / ".config")
        plan = make_plan(config_layers(tmp_path), tmp_path)
        prepare(plan.base.data, tmp_path)
        return Folder(tmp_path)

    return make


def test_trains_reports_skips_and_trains_again(build):
    folder = build()
    code, table, said = folder.command("scripts/run_test_matrix.py", STEPS="0,1,full")
    assert code == 0, said
    assert re.search(r"\| +1 \| pruned-50 .* n=1 .* 50\.0% \| done +\|", table)
    assert "Unigram entropy of the training text" in table
    assert (folder.path / "results/ratio/table.md").read_text() == table
    weights = [RunDir(path).weights.read_bytes() for path in folder.runs("0,1,full")]

    code, text, said = folder.command("scripts/run_test_matrix.py", STEPS="0,1,full", JSON="1")
    assert code == 0 and "nothing to run: 3 of 3 done" in said
    rows = json.loads(text)["rows"]
    assert [row["slug"] for row in rows] == ["baseline", "pruned-50", "full"]
    assert rows[1]["sparsity"] == pytest.approx(0.5, abs=1e-3)

    code, _, said = folder.command("scripts/rerun.py", "pruned-50")
    assert code == 2 and "YES=1" in said
    code, _, said = folder.command("scripts/rerun.py", "pruned-50", YES="1")
    assert code == 0 and "kept as pruned-50-s1-" in said and "baseline" not in said
    # The same configuration and seed: the same bytes.
    assert [RunDir(path).weights.read_bytes() for path in folder.runs("0,1,full")] == weights


def test_trains_one_run_in_this_process_and_says_what_to_choose(build):
    folder = build()
    code, _, said = folder.command("scripts/train.py")
    assert code == 2 and "make train STEPS=7" in said
    code, _, said = folder.command("scripts/train.py", "--steps", "2")
    assert code == 0 and "DONE" in said
    (path,) = folder.runs("2")
    assert read_status(RunDir(path)).state is State.SUCCESS
    assert "golden-s1" in path.name and "SKIP" in folder.command("scripts/train.py", STEPS="2")[2]


def test_a_step_by_number_is_the_same_run_as_makes(build):
    folder = build()
    script = "gpt2/train_ra_mla.py"
    code, table, said = folder.command(script, "--ra-mla-ablation-step", "ra")
    assert code == 0, said
    assert "| ra " in table
    assert read_status(RunDir(folder.runs("5")[0])).state is State.SUCCESS
    flags = ("--ra-mla-ablation-step", "5", "--optimizer", "sgd", "--max-iters", "many")
    code, _, said = folder.command(script, *flags)
    assert code == 2
    assert "OPTIMIZER_SGD=y: no such symbol" in said and "MAX_ITERS=many: wrong type" in said


def test_a_dry_run_needs_no_data_and_writes_nothing(build):
    folder = build(DRY_RUN=True)
    (folder.path / "data").rename(folder.path / "gone")
    code, _, said = folder.command("scripts/run_test_matrix.py", STEPS="1,full,17")
    assert code == 0, said
    assert said.count("   ok") == 3 and "3 passed, 0 failed" in said
    assert not (folder.path / "results").exists()


def test_an_absent_device_is_told_before_anything_is_created_or_prepared(build):
    folder = build(DEVICE_CPU=None, DEVICE_CUDA=True)
    (folder.path / "data").rename(folder.path / "gone")
    code, _, said = folder.command("scripts/run_test_matrix.py", CUDA_VISIBLE_DEVICES="")
    assert code == 3
    assert "DEVICE=cuda, but there is no GPU" in said
    assert not (folder.path / "results").exists() and not (folder.path / "data").exists()


def test_missing_data_is_prepared_before_training(build):
    folder = build()
    (folder.path / "data").rename(folder.path / "gone")
    code, _, said = folder.command("scripts/run_test_matrix.py", STEPS="0")
    assert code == 0, said
    assert (folder.path / "data").exists()
