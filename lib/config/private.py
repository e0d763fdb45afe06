"""Settings that are not recorded: commands and options of a scheduler, where addresses and tokens stand.

A run records a digest of each, so that a change is visible.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence

from lib.config.field import SymbolValue

PRIVATE_SYMBOLS = (
    *("ON_DONE_CMD", "ON_FAIL_CMD", "ON_STUDY_DONE_CMD"),
    *("SLURM_SETUP", "SLURM_OPTIONS"),
)
_ASSIGNED = re.compile(rf"\b({'|'.join(PRIVATE_SYMBOLS)})=.*", re.DOTALL)


def without_private(values: Mapping[str, SymbolValue]) -> dict[str, SymbolValue]:
    """Return ``values`` to be recorded, in which private ones are empty."""
    return {name: "" if name in PRIVATE_SYMBOLS else value for name, value in values.items()}


def private_digests(values: Mapping[str, SymbolValue]) -> dict[str, str]:
    """Return the SHA-256, in hex, of each private value that is not empty."""
    texts = {name: str(values.get(name, "")) for name in PRIVATE_SYMBOLS}
    return {name: hashlib.sha256(t.encode()).hexdigest() for name, t in texts.items() if t}


def without_private_words(words: Sequence[str]) -> list[str]:
    """Return a command line to be recorded; a word ends at a private value in it."""
    return [_ASSIGNED.sub(r"\1=", word) for word in words]
