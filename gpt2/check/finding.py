"""Findings of a check."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One violated property, with the expected and the found value as text."""

    # Stable kebab-case name of the property, for programs and tests. For an error it is a code:
    # check.exception (in the checked code), check.defect (in the check), or a KablateError's code.
    property: str
    expected: str
    found: str
    # Missing input, such as data to prepare; not a failure by itself.
    absent: bool = False
