"""Notes of make check on configured sizes, which the small forms do not show."""

from gpt2.check import CHECKS
from gpt2.check.cases import plan_cases
from gpt2.check.finding import CheckFinding
from gpt2.check.report import CaseReport, CheckReport, CheckResult
from lib.config.dotconfig import defconfig_layers
from lib.project import ROOT


def test_notes_describe_the_configured_sizes_and_are_not_repeated():
    cases = plan_cases(defconfig_layers(ROOT, "nsa-perf"))
    reports = [CaseReport(case.slug) for case in cases.chosen]
    report = CheckReport(cases, [], reports)
    said = report.to_text()
    taken = [case.label for case in cases.chosen if case.config.model.shape.block_size == 512]
    others = f" +{len(taken) - 1}" if taken[1:] else ""
    sizes = "NSA_SELECT_COUNT=8 x NSA_SELECT_BLOCK=64 >= BLOCK_SIZE=512"
    line = f"WARN  {taken[0]}{others}: selection takes every block: {sizes}"
    assert said.count("selection takes every block") == 1 and f"\n{line}\n" in said
    assert line in report.to_json()["notes"]


def test_a_table_wider_than_the_terminal_counts_the_checks_of_a_step():
    cases = plan_cases(defconfig_layers(ROOT, "gpt2-ratio-small"), steps="0,12")
    failed = CheckResult([CheckFinding("a-property", "a", "b")], 0.25)
    results = {name: CheckResult([], 0.5) for name in CHECKS} | {"causal": failed}
    reports = [CaseReport(case.slug, results) for case in cases.chosen]
    checks = list(CHECKS.values())
    report = CheckReport(cases, checks, reports)
    narrow = report.to_text(80).splitlines()

    assert max(map(len, narrow)) <= 80
    assert narrow[2].split()[1:4] == [str(len(CHECKS) - 1), "1", "0"]
    assert narrow[-1].split()[:3] == [str(2 * len(CHECKS) - 2), "passed,", "2"]
    assert "causal" in report.to_text().splitlines()[0]
