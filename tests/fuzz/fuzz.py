"""Damage every file that commands read, one file and one command at a time: make fuzz COUNT= SEED=.

A failure is shrunk and saved in tests/fuzz/cases, which tests/fuzz/test_fuzz.py runs from then on.
"""

import argparse
import fnmatch
import json
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from gpt2.planning.arguments import whole_number
from lib.console import run_main
from lib.make_variables import require_read
from lib.project import ROOT
from tests.fuzz import mutations
from tests.fuzz.harness import Case, Study
from tests.fuzz.study import trained_study

CASES = ROOT / "tests/fuzz/cases"
_MAX_SAVED = 40
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
    (file,) = fnmatch.filter(study.files, fields["file"])
    return Case(fields["command"], file, fields["operations"])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", default=os.environ.get("COUNT") or "500")
    parser.add_argument("--seed", default=os.environ.get("SEED") or "1")
    parser.add_argument("--keep", action="store_true", help="save the failures as tests")
    args = parser.parse_args()
    # The commands under test would refuse or read the variables of make fuzz.
    require_read({"COUNT", "SEED"})
    count, seed = whole_number(args.count, "COUNT", 1), whole_number(args.seed, "SEED")
    for name in ("COUNT", "SEED"):
        os.environ.pop(name, None)
    began = time.monotonic()
    manners: Counter[str] = Counter()
    with temporary_folder() as folder:
        study = trained_study(Path(folder))
        for number, case in enumerate(draw_cases(study, count, seed), 1):
            failure = study.check(case)
            if failure:
                manners[failure.partition(":")[0]] += 1
                case = shrink(study, case, failure)
                print(f"FAIL    {failure}   {json.dumps(asdict(case))[:600]}", flush=True)
                if args.keep and sum(manners.values()) <= _MAX_SAVED:
                    save(case, failure)
            if number % 250 == 0:
                print(f"FUZZ    {number} cases, {time.monotonic() - began:.0f} s", flush=True)
    shown = ", ".join(f"{count} {name}" for name, count in sorted(manners.items())) or "no failure"
    print(f"FUZZ    {count} cases with seed {seed}: {shown}")
    return 1 if manners else 0


if __name__ == "__main__":
    run_main(main)
