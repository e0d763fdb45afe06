"""Damage to files that commands read, one file and one command at a time: drawn or saved."""

import fnmatch
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lib.project import ROOT
from tests.fuzz import mutations
from tests.fuzz.harness import Case, Study

CASES = ROOT / "tests/fuzz/cases"
# Share of the cases of a run that replace its whole directory.
_WHOLE_RUNS = 0.05


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory if possible: checkpoints are synced, which takes long on a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="kablate-fuzz-", dir=memory)


def draw_cases(study: Study, count: int, seed: int) -> Iterator[Case]:
    """Yield ``count`` cases: folders and kinds of files are equally likely, not files."""
    chance = random.Random(seed)
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in study.files:
        kinds.setdefault(study.kind(name), []).append(name)
    for _ in range(count):
        file = chance.choice(kinds[chance.choice(sorted(kinds))])
        command = chance.choice(study.commands_for(file))
        if file.startswith("results/") and file.count("/") == 3 and chance.random() < _WHOLE_RUNS:
            yield Case(command, str(Path(file).parent), mutations.draw_node(chance))
        else:
            yield Case(command, file, mutations.draw(chance, study.tree / file))


def load(path: Path, study: Study) -> Case:
    """Return a saved case for ``study``."""
    fields = json.loads(path.read_text())
    folders = {str(Path(name).parent) for name in study.files}
    (file,) = fnmatch.filter([*study.files, *folders], fields["file"])
    return Case(fields["command"], file, fields["operations"])
