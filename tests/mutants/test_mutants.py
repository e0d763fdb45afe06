"""``make check`` fails on every planted fault, and names the step and the check."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2.check import CHECKS
from gpt2.check.cases import CheckPlan, plan_cases
from gpt2.check.report import CheckReport
from gpt2.data.prepare import prepare_dataset
from gpt2.study.resolve import resolve_config
from lib import console
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.project import ROOT
from tests.check_cases import run_in_process
from tests.mutants.data import TEXT
from tests.mutants.mutant import Expected, Mutant, planted_faults

pytestmark = pytest.mark.usefixtures("torch_as_before")

MUTANTS = planted_faults()


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory) -> Path:
    """Return a build folder with a text, prepared as byte tokens."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "text").mkdir()
    for first, side in enumerate(("train", "val")):
        tokens = (np.arange(20_000, dtype="<u2") + first) % 251
        tokens.tofile(folder / "text" / f"{side}.bin")
    settings = {**TEXT, "TOKENIZER_BYTE": True}
    prepare_dataset(
        resolve_config(KconfigTree(), [ConfigLayer.of("text", "a test", settings)]).data, folder
    )
    return folder


def check(mutant: Mutant, build_dir: Path) -> tuple[dict[str, Any], str]:
    """Return the mutant's step in check.json, and the printed report."""
    layers = [
        *defconfig_layers(ROOT, mutant.defconfig),
        ConfigLayer.of("mutant", "a test", mutant.settings),
    ]
    cases = plan_cases(layers)
    (case,) = [case for case in cases.every if case.slug == mutant.step]
    near = (case.parent, *mutant.beside)
    others = {other.slug: other for other in cases.every if other.slug in near}
    checks = [CHECKS[name] for name in mutant.caught_by]
    found = [run_in_process(case, checks, others, build_dir)]
    report = CheckReport(CheckPlan(cases.study, cases.every, [case]), checks, found)
    (step,) = report.to_json()["steps"]
    return step, console.shown(report.to_text(), colour=False)


def _check_interpreted(mutant: Mutant, build_dir: Path) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "tests.mutants.interpreted", mutant.name, str(build_dir)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)
    step, text = json.loads(done.stdout.splitlines()[-1])
    return step, text


def matches(finding: dict[str, str], expected: Expected) -> bool:
    """Return whether a finding has the expected property, names and numbers."""
    name, *patterns = (expected,) if isinstance(expected, str) else expected
    text = f"{finding['expected']}; {finding['found']}"
    return finding["property"] == name and all(re.search(pattern, text) for pattern in patterns)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=() if mutant.quick else pytest.mark.long)
        for mutant in MUTANTS
    ],
)
def test_a_mutant_is_caught(mutant, monkeypatch, build_dir):
    if "device" in mutant.caught_by:
        step, text = _check_interpreted(mutant, build_dir)
    else:
        mutant.plant(monkeypatch)
        step, text = check(mutant, build_dir)
    for name, expected in mutant.caught_by.items():
        result = step["results"][name]
        findings = result["findings"]
        assert result["state"] == "failed" and any(matches(f, expected) for f in findings), findings
        assert not any(f["property"] == "check.defect" for f in findings), findings
        # The user cannot repair a fault of the product by another configuration.
        assert name == "resolve" or not any("menuconfig" in f["found"] for f in findings), findings
        shown = next(
            x for x in text.splitlines() if x.startswith(f"FAIL  {step['label']}  {name}:")
        )
        assert findings[0]["expected"] in shown and findings[0]["found"] in shown
        assert "[make check " in shown
    assert text.endswith(f"0 passed, {len(mutant.caught_by)} failed\n")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_patches_attributes_that_exist(mutant, monkeypatch):
    """Catch a rename at once: most faults are only planted by the long tests."""
    mutant.plant(monkeypatch)


def test_names_of_mutants_are_unique():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_every_check_has_a_quick_mutant():
    assert {name for mutant in MUTANTS if mutant.quick for name in mutant.caught_by} == set(CHECKS)
