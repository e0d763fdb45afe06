"""Notes of make check on configured sizes, which the small forms do not show."""

from gpt2.check.cases import find_cases
from gpt2.check.report import document, text
from gpt2.check.run import Report
from lib.kconfig import defconfig_layers
from lib.project import ROOT


def test_notes_describe_the_configured_sizes_and_are_not_repeated() -> None:
    cases = find_cases(defconfig_layers(ROOT, "nsa-perf"))
    reports = [Report(case.slug) for case in cases.chosen]
    said = text(cases, [], reports, "make check", 0.0)
    taken = [case.label for case in cases.chosen if case.config.model.shape.block_size == 512]
    others = f" +{len(taken) - 1}" if taken[1:] else ""
    sizes = "NSA_SELECT_COUNT=8 x NSA_SELECT_BLOCK=64 >= BLOCK_SIZE=512"
    line = f"WARN  {taken[0]}{others}: selection takes every block: {sizes}"
    assert said.count("selection takes every block") == 1 and f"\n{line}\n" in said
    assert line in document(cases, [], reports, "make check", 0.0)["notes"]
