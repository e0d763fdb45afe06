"""``make check`` fails on every planted fault, and names the step and the check.

    TRITON_INTERPRET=1 python -m tests.mutants.test_mutants NAME FOLDER

prints the step of check.json and the report for one fault, from a process of its own: triton reads the
variable that enables its interpreter when it is imported.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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
from tests.mutants.mutant import planted_faults

pytestmark = pytest.mark.usefixtures("torch_as_before")

FAULTS = {mutant.name: mutant for mutant in planted_faults()}
TEXT = {"DATASET_CUSTOM": True, "CUSTOM_PATH": "text", "CUSTOM_FORMAT_BIN": True}


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory):
    """Return a build folder with a text, prepared as byte tokens."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "text").mkdir()
    for first, side in enumerate(("train", "val")):
        tokens = (np.arange(20_000, dtype="<u2") + first) % 251
        tokens.tofile(folder / "text" / f"{side}.bin")
    layer = ConfigLayer.of("text", "a test", {**TEXT, "TOKENIZER_BYTE": True})
    prepare_dataset(resolve_config(KconfigTree(), [layer]).data, folder)
    return folder


def check(mutant, build_dir):
    """Return the mutant's step in check.json, and the printed report."""
    settings = ConfigLayer.of("mutant", "a test", mutant.settings)
    cases = plan_cases([*defconfig_layers(ROOT, mutant.defconfig), settings])
    (case,) = [case for case in cases.every if case.slug == mutant.step]
    parents = {other.slug: other for other in cases.every if other.slug == case.parent}
    checks = [CHECKS[name] for name in mutant.caught_by]
    found = [run_in_process(case, checks, parents, build_dir)]
    report = CheckReport(CheckPlan(cases.study, cases.every, [case]), checks, found)
    (step,) = report.to_json()["steps"]
    return step, console.shown(report.to_text(), colour=False)


def check_interpreted(mutant, build_dir):
    command = [sys.executable, "-m", "tests.mutants.test_mutants", mutant.name, str(build_dir)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def matches(finding, expected):
    """Return whether a finding has the expected property, names and numbers."""
    name, *patterns = expected
    text = f"{finding['expected']}; {finding['found']}"
    return finding["property"] == name and all(re.search(pattern, text) for pattern in patterns)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=name, marks=() if mutant.quick else pytest.mark.long)
        for name, mutant in FAULTS.items()
    ],
)
def test_a_fault_is_caught(mutant, monkeypatch, build_dir, tmp_path):
    if "device" in mutant.caught_by:
        step, text = check_interpreted(mutant, build_dir)
    else:
        mutant.plant(monkeypatch, tmp_path)
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


@pytest.mark.parametrize("mutant", FAULTS.values(), ids=FAULTS)
def test_a_fault_can_be_planted(mutant, monkeypatch, tmp_path):
    """A change of the product shows at once: most faults are only checked by the long tests."""
    mutant.plant(monkeypatch, tmp_path)


def test_every_check_has_a_quick_fault():
    assert {name for mutant in FAULTS.values() if mutant.quick for name in mutant.caught_by} == set(
        CHECKS
    )


@pytest.fixture(scope="module")
def claims():
    """Return check, claim and faults of docs/check.md; an empty first cell repeats the check."""
    document = (ROOT / "docs/check.md").read_text(encoding="utf-8")
    table = document.split("| check | claim | planted faults |\n|---|---|---|\n")[1]
    rows = []
    for line in table.split("\n\n")[0].splitlines():
        check, claim, faults = (cell.strip() for cell in line.strip("|").split(" | "))
        rows.append((check or rows[-1][0], claim, faults.split("; ")))
    return rows


def test_every_check_claims_what_planted_faults_show(claims):
    assert list(dict.fromkeys(check for check, *_ in claims)) == list(CHECKS)
    assert len({claim for _, claim, _ in claims}) == len(claims)
    claimed = set()
    for check, claim, names in claims:
        for name in names:
            assert name in FAULTS and check in FAULTS[name].caught_by, f"{check}: {claim}: {name}"
            claimed |= {(c, expected[0]) for c, expected in FAULTS[name].caught_by.items()}
    violated = {
        (c, expected[0]) for fault in FAULTS.values() for c, expected in fault.caught_by.items()
    }
    # Names with a dot are codes of errors.
    assert not {pair for pair in violated if "." not in pair[1]} - claimed


if __name__ == "__main__":
    chosen, folder = FAULTS[sys.argv[1]], Path(sys.argv[2])
    with pytest.MonkeyPatch.context() as patch:
        chosen.plant(patch, folder)
        print(json.dumps(check(chosen, folder)))
