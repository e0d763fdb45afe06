"""docs/check.md names, for each claim of a check, planted faults that the check detects."""

import pytest

from gpt2.check import CHECKS
from lib.project import ROOT
from tests.mutants.mutant import Mutant, planted_faults

FAULTS = {mutant.name: mutant for mutant in planted_faults()}
# Check, claim, and names of faults.
Claim = tuple[str, str, list[str]]


@pytest.fixture(scope="module")
def document() -> str:
    """Return docs/check.md."""
    return (ROOT / "docs/check.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def claims(document) -> list[Claim]:
    """Return the rows of the table of claims; an empty first cell repeats the check."""
    table = document.split("| check | claim | planted faults |\n|---|---|---|\n")[1].split("\n\n")[
        0
    ]
    rows: list[Claim] = []
    for line in table.splitlines():
        check, claim, faults = (cell.strip() for cell in line.strip("|").split(" | "))
        rows.append((check or rows[-1][0], claim, faults.split("; ")))
    return rows


def properties(mutant: Mutant) -> set[tuple[str, str]]:
    """Return checks and the properties of their findings."""
    return {
        (check, expected if isinstance(expected, str) else expected[0])
        for check, expected in mutant.caught_by.items()
    }


def test_every_check_has_claims(claims):
    assert list(dict.fromkeys(check for check, *_ in claims)) == list(CHECKS)
    assert len({claim for _, claim, _ in claims}) == len(claims)


def test_every_claim_names_faults_that_its_check_detects(claims):
    wrong = {
        f"{check}: {claim}: {name}"
        for check, claim, names in claims
        for name in names
        if name not in FAULTS or check not in FAULTS[name].caught_by
    }
    assert not wrong


def test_every_property_that_a_fault_violates_is_claimed(claims):
    claimed = {
        (check, name)
        for check, _, names in claims
        for fault in names
        for _, name in properties(FAULTS[fault])
    }
    # Names with a dot are codes of errors.
    violated = {pair for fault in FAULTS.values() for pair in properties(fault)}
    assert not {pair for pair in violated if "." not in pair[1]} - claimed
