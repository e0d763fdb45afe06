"""Check a planted fault in a process that imports triton for its interpreter.

    TRITON_INTERPRET=1 python -m tests.mutants.interpreted NAME FOLDER

Prints the step of check.json and the printed report, as one JSON list.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.mutants.mutant import planted_faults
from tests.mutants.test_mutants import check

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    (mutant,) = [each for each in planted_faults() if each.name == name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.plant(monkeypatch)
        print(json.dumps(check(mutant, Path(folder))))
