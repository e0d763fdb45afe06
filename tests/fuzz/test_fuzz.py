"""No damaged file makes a command crash or deceive: saved failures, a few cases, and many by -m fuzz."""

import fnmatch
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from lib.errors import CONTROL_CHARACTER
from tests.fuzz import damage
from tests.integration.conftest import IN_PROCESS, STEP, Folder, set_up, wait_for

# In the suite.
SHARE = 20
COUNT, SEED = (
    int(os.environ.get(name) or default) for name, default in (("COUNT", 500), ("SEED", 1))
)
EXIT_CODES = {0, 1, 2, 3, 4, 5, 6, 124, 130}
SETTINGS = {
    "DROPOUT": "0.0",
    "TELEMETRY_INTERVAL": 10,
    "EVAL_INTERVAL": 4,
    "CHECKPOINT_INTERVAL": 2,
    "BATCH_SIZE": 4,
    "GRAD_ACCUMULATION": 1,
    "MAX_ITERS": 8,
}
# Two steps with a seed, and another seed that was killed.
STUDY, EVERY = "--steps 0,1 --seeds 1", "--steps 0,1 --seeds 1,3"
UNFINISHED = "-s3-"
# A and B are the first two finished runs.
COMMANDS = {
    "plan": f"plan {STUDY}",
    "status": f"status {EVERY}",
    "status-json": f"status {EVERY} --json",
    "watch": f"watch {EVERY}",
    # No run is running, so no text depends on the time.
    "watch-done": f"watch {STUDY}",
    "report": f"report {STUDY}",
    "report-json": f"report {STUDY} --json",
    "verdicts-json": f"verdicts {STUDY} --json",
    "ls": "ls",
    "audit": f"audit {STUDY} --runs *",
    "compare": "compare A B",
    "compare-json": "compare A B --json",
    "verify-results": f"verify-results {STUDY}",
    "make": f"all {STUDY}",
    "train": " ".join((*IN_PROCESS, STEP, "0 --seed 3")),
    "evaluate": "evaluate --run A",
    "generate": "generate --run A --tokens 4",
    "export": "export A",
    "data-verify": "data --verify",
    "data": "data",
    "why": "why N_LAYER",
    "olddefconfig": "olddefconfig",
    "claims": f"claims {STUDY}",
    # Plan a run from the files of another, and stop before they train.
    "reproduce": "reproduce --run A --data absent",
    "prolong": "prolong A --iters 4 --jobs x",
    "telemetry": "scripts/query_wandb_gpu.py --run-name NAME",
}
# Commands that read the files of a place; those of a finished run are read by the others, and by some.
BUILD = ("plan", "status", "why", "olddefconfig", "data-verify", "report")
DATA = ("data", "data-verify", "evaluate", "train", "make", "plan")
BEGUN = ("train", "train", "status", "status-json", "watch", "audit", "ls", "plan")
DONE = (*COMMANDS.keys() - {*BUILD, *DATA}, "plan", "status", "report", "make", "evaluate")
# Their output has no figure that a damaged file may change without a message.
FIGURES = ("report-json", "verdicts-json", "compare-json")
CLAIMS = """study = "ratio"
[[claim]]
name = "loss"
text = "the loss of the baseline"
step = "baseline"
field = "val_loss"
value = "1"
"""
RUN = "results/ratio/baseline-s1-*"
OTHER = "results/ratio/pruned-50-s1-*"
SNAPSHOT = "environment/snapshot.json"
# Command, file and operations of failures.
SAVED = [
    (
        "verdicts-json",
        f"{OTHER}/summary.json",
        ["set", 0, ["calibration", "n_correct", 5], "@deep"],
    ),
    ("train", "results/ratio/baseline-s3-*/checkpoints/step-00000004/state.pt", ["fifo"]),
    ("train", SNAPSHOT, ["set", 0, ["taken_at"], "x"]),
    (
        "status-json",
        f"{OTHER}/manifest.json",
        ["set", 0, ["origin", "sources", "gpt2/loss.py"], -1],
    ),
    ("compare", f"{RUN}/resolved_config.yaml", ["set", 0, ["symbols", "RECIPROCAL"], "@delete"]),
    ("plan", "config.py", ["fifo"]),
    ("data-verify", "config.py", ["device"]),
]


@dataclass(frozen=True)
class Case:
    """One damaged file under one command."""

    command: str
    file: str
    operations: list[damage.Operation]


@dataclass
class Study:
    """A folder with a trained study, of which each case begins with a copy."""

    folder: Folder
    whole: Path
    runs: list[Path]
    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def victim(self) -> Path:
        """Return a file outside the build folder, which links lead to."""
        return self.folder.scratch / "victim"

    @property
    def files(self) -> list[str]:
        return [str(p.relative_to(self.whole)) for p in self.whole.rglob("*") if p.is_file()]

    def run(self, command: str) -> tuple[int, str, str]:
        a, b = self.runs
        names = {"A": str(a), "B": str(b), "NAME": a.name}
        words = [names.get(word, word) for word in COMMANDS[command].split()]
        process = self.folder.start(*words, NO_COLOR="1")
        try:
            return process.wait(60), process.stdout, process.stderr
        except TimeoutError:
            process.kill()
            return 0, "", "hang"

    def check(self, case: Case) -> str:
        """Damage the file and run the command; return what went wrong, or ""."""
        tree = self.folder.path
        shutil.rmtree(tree)
        shutil.copytree(self.whole, tree)
        self.victim.write_text("victim")
        damage.apply(tree / case.file, case.operations, self.victim)
        before = protected(tree)
        code, out, said = self.run(case.command)
        problems = {
            "hang": said == "hang",
            "traceback": "Traceback (most recent call last)" in out + said,
            "control character": CONTROL_CHARACTER.search(re.sub("[\t\n]", "", out + said)),
            f"exit code {code}": code not in EXIT_CODES,
            "code executed": any(tree.parent.rglob(damage.CANARY)),
            "written through a link": self.victim.read_text() != "victim",
            "changed": protected(tree) != before,
        }
        if case.command in self.figures and code == 0:
            problems["figure changed"] = self._deceives(case, out, said)
        return next((name for name, found in problems.items() if found), "")

    def _deceives(self, case: Case, out: str, said: str) -> bool:
        """Return whether a figure changed, and no message names the file or its run."""
        path = Path(case.file)
        named = any(name in out + said for name in (path.name, *path.parts[2:3]))
        before, after = self.figures[case.command], dict(numbers(json.loads(out)))
        differ = any(after.get(place, before[place]) != before[place] for place in before)
        return path.parts[0] == "results" and not named and differ


def protected(tree: Path) -> dict[str, tuple[int, ...]]:
    """Return what changes if the file of a finished run is written, which no command may do.

    A later evaluation and an export have folders of their own.
    """
    paths = [path for path in tree.glob("results/*/*-s*-*/**/*") if UNFINISHED not in str(path)]
    paths = [path for path in paths if not {"evaluations", "export"} & {*path.parts}]
    found = {str(path): path.lstat() for path in paths if not path.name.startswith(".lease-")}
    return {n: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode) for n, s in found.items()}


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield place and value of each number in a JSON document."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(part, f"{place}/{key}")
    elif isinstance(value, int | float):
        yield place, value


@pytest.fixture(scope="module")
def study(tmp_path_factory, server) -> Study:
    place = tmp_path_factory.mktemp("fuzz")
    folder = Folder(place / "build", server, tmp_path_factory.mktemp("streams"))
    set_up(folder.path, **SETTINGS)
    (folder.path / "claims.toml").write_text(CLAIMS)
    made = Study(folder, place / "whole", folder.runs("0,1"))
    assert made.run("make")[0] == 0
    killed = folder.start(*COMMANDS["train"].split())
    pattern = f"results/*/*{UNFINISHED}*/checkpoints/step-*"
    wait_for(lambda: len(list(folder.path.glob(pattern))) == 2, killed)
    killed.kill()
    # Commands write files of their own the first time.
    for name in ("report", "plan", "watch"):
        assert made.run(name)[0] in (0, 4), name
    shutil.copytree(folder.path, made.whole)
    for name in FIGURES:
        made.figures[name] = dict(numbers(json.loads(made.run(name)[1])))
    return made


@st.composite
def cases(draw: st.DrawFn, study: Study) -> Case:
    """Folders and kinds of files are equally likely, not files; some whole runs are replaced."""
    kinds: dict[str, list[str]] = {}
    for name in study.files:
        place = re.sub(r"results/\w+/\S+?-s", "", name) if UNFINISHED in name else name
        kinds.setdefault(re.sub(r"environment/.*|[\w-]+-s1-\w+|\d", "", place), []).append(name)
    file = draw(st.sampled_from(sorted(kinds)).flatmap(lambda k: st.sampled_from(kinds[k])))
    of_run = file.startswith("results/")
    place = BEGUN if UNFINISHED in file else DONE if of_run else DATA if "/" in file else BUILD
    command = draw(st.sampled_from(place))
    if of_run and file.count("/") == 3 and draw(st.integers(0, 19)) == 0:
        return Case(command, str(Path(file).parent), draw(damage.NODE))
    return Case(command, file, draw(damage.operations(study.whole / file)))


def check_cases(study: Study, count: int, number: int) -> None:
    """Check drawn cases; a failure belongs in SAVED, with * for a hash."""

    @seed(number)
    @settings(max_examples=count, derandomize=False, phases=[Phase.generate])
    @given(cases(study))
    def check(case: Case) -> None:
        assert study.check(case) == ""

    check()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "pattern", "operation"), SAVED)
def test_a_saved_failure_does_not_return(study, command, pattern, operation):
    (file,) = fnmatch.filter(study.files, pattern)
    assert study.check(Case(command, file, [operation])) == ""


@pytest.mark.slow
def test_damaged_files_make_no_command_crash_or_deceive(study):
    check_cases(study, SHARE, 7)


@pytest.mark.slow
def test_each_kind_of_failure_is_noticed(study, monkeypatch):
    """Commands that do what none may do."""
    tree = study.folder.path
    run = study.runs[0]
    document = json.dumps({"loss": 2.0})
    monkeypatch.setitem(study.figures, "report-json", {"/loss": 1.0})
    faults = {
        "hang": lambda: (0, "", "hang"),
        "traceback": lambda: (1, "", "Traceback (most recent call last)\nKeyError"),
        "control character": lambda: (0, "\x1b[2J", ""),
        "exit code 77": lambda: (77, "", ""),
        "code executed": lambda: (0, str((tree / damage.CANARY).mkdir()), ""),
        "written through a link": lambda: (0, str(study.victim.write_text("lost")), ""),
        "changed": lambda: (
            0,
            str((run / "summary.json").unlink()),
            "",
        ),
        "figure changed": lambda: (0, document, ""),
    }
    for expected, fault in faults.items():
        monkeypatch.setattr(study, "run", lambda command: fault())
        command = "report-json" if expected == "figure changed" else "plan"
        case = Case(command, f"results/ratio/{run.name}/metrics.jsonl", [["flip", 0.5, 1]])
        assert study.check(case) == expected


@pytest.mark.fuzz
def test_damage_at_length(study):
    check_cases(study, COUNT, SEED)
