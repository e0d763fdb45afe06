"""Every assignment of a step takes effect, and all rules hold."""

from gpt2.check.cases import Case
from gpt2.check.finding import Finding


def check(case: Case) -> list[Finding]:
    """One finding for each problem; needs no torch, and takes the case itself."""
    return [
        Finding("the step resolves", "; ".join(line.strip() for line in str(problem).splitlines()))
        for problem in case.problems
    ]
