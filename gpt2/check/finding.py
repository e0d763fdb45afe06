"""What a check found wrong."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One broken property, in words for a person."""

    expected: str
    found: str
    # Something to get rather than something wrong: it fails nothing by itself.
    absent: bool = False
