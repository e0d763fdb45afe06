"""Damage to files that commands read, one file and one command at a time: drawn, shrunk and saved."""

import fnmatch
import json
import os
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from lib.project import ROOT
from tests.fuzz import mutations
from tests.fuzz.harness import Case, Study

CASES = ROOT / "tests/fuzz/cases"
# Share of the cases of a run that replace its whole directory.
_WHOLE_RUNS = 0.05
_HASH = re.compile(r"-[0-9a-f]{8}(?=/)|-[0-9a-f]{16}(?=\.json)")


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


def shrink(study: Study, case: Case, failure: str) -> Case:
    """Return ``case`` with as few operations as still fail in the same manner."""
    manner = failure.partition(":")[0]
    for operation in tuple(case.operations):
        fewer = [o for o in case.operations if o is not operation]
        smaller = Case(case.command, case.file, fewer)
        if fewer and study.check(smaller).startswith(manner):
            case = smaller
    return case


def save(case: Case, failure: str) -> None:
    """Write a case as a test; a pattern stands for the hashes in the names of runs."""
    number = len(list(CASES.glob("*.json"))) + 1
    path = CASES / f"{number:03d}-{case.command}.json"
    fields = {**asdict(case), "file": _HASH.sub("-*", case.file), "failure": failure}
    path.write_text(json.dumps(fields, indent=1) + "\n")


def load(path: Path, study: Study) -> Case:
    """Return a saved case for ``study``."""
    fields = json.loads(path.read_text())
    folders = {str(Path(name).parent) for name in study.files}
    (file,) = fnmatch.filter([*study.files, *folders], fields["file"])
    return Case(fields["command"], file, fields["operations"])
