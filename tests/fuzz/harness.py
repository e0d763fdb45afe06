"""A small trained study, the commands that read it, and what no damage of a file may do to them."""

import importlib
import json
import os
import select
import shutil
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lib import console, kablate
from lib.errors import CONTROL_CHARACTER
from lib.project import ROOT
from tests.fuzz import mutations
from tests.fuzz.mutations import Operation

TIMEOUT_SECONDS = 60.0
EXIT_CODES = {0, 1, 2, 3, 4, 5, 6, 124, 130}
STEPS, SEEDS = "0,1", "1"
# The run of this seed was killed.
UNFINISHED_SEED = "3"

_STUDY = ("--steps", STEPS, "--seeds", SEEDS)
IN_PROCESS = ("gpt2.train_ra_mla", "--in-process", "--ra-mla-ablation-step")
# Module and arguments of a script; A and B are the first two finished runs.
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", *_STUDY),
    "status": ("status", "--steps", STEPS, "--seeds", "1,3"),
    "status-json": ("status", "--steps", STEPS, "--seeds", "1,3", "--json"),
    "watch": ("watch", "--steps", STEPS, "--seeds", "1,3"),
    # No run is running, so no text depends on the time.
    "watch-done": ("watch", *_STUDY),
    "report": ("report", *_STUDY),
    "report-json": ("report", *_STUDY, "--json"),
    "verdicts-json": ("verdicts", *_STUDY, "--json"),
    "ls": ("ls",),
    "audit": ("audit", *_STUDY, "--runs", "*"),
    "compare": ("compare", "A", "B"),
    "compare-json": ("compare", "A", "B", "--json"),
    "verify-results": ("verify-results", *_STUDY),
    "make": ("all", "--steps", STEPS, "--seeds", SEEDS),
    "train": (*IN_PROCESS, "0", "--seed", UNFINISHED_SEED),
    "evaluate": ("evaluate", "--run", "A"),
    "generate": ("generate", "--run", "A", "--tokens", "4"),
    "export": ("export", "A"),
    "data-verify": ("data", "--verify"),
    "data": ("data",),
    "why": ("why", "N_LAYER"),
    "olddefconfig": ("olddefconfig",),
    "claims": ("claims", *_STUDY),
    # Plan a run from the files of another, and stop before they train.
    "reproduce": ("reproduce", "--run", "A", "--data", "absent"),
    "prolong": ("prolong", "A", "--iters", "4", "--jobs", "x"),
    "telemetry": ("query_wandb_gpu", "--run-name", "NAME"),
}
# Commands that read the files of a place.
_BUILD_COMMANDS = ("plan", "status", "why", "olddefconfig", "data-verify", "report")
_DATA_COMMANDS = ("data", "data-verify", "evaluate", "train", "make", "plan")
_UNFINISHED_COMMANDS = ("train", "train", "status", "status-json", "watch", "audit", "ls", "plan")
_RUN_COMMANDS = (
    *(name for name in COMMANDS if name not in (*_BUILD_COMMANDS, *_DATA_COMMANDS)),
    *("plan", "status", "report", "make", "evaluate"),
)
# Their output has no figure that a damaged file may change without a message.
FIGURES = ("report-json", "verdicts-json", "compare-json")
# Words and numbers that the claims file of the study quotes.
CLAIMS = """
study = "ratio"
[[claim]]
name = "loss"
text = "the loss of the baseline"
step = "baseline"
field = "val_loss"
value = "1"
"""

_NO_DIGITS = str.maketrans("", "", "0123456789")


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory if possible: checkpoints are synced, which takes long on a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="kablate-fuzz-", dir=memory)


@dataclass(frozen=True)
class Case:
    """One damaged file under one command."""

    command: str
    file: str
    operations: list[Operation]


@dataclass(frozen=True)
class Outcome:
    """Result of a command: its exit code, None if it had to be killed, and its output."""

    code: int | None
    stdout: str
    stderr: str


@dataclass
class Study:
    """A folder with a trained study, which ``restore`` makes whole again after each case."""

    folder: Path
    mains: Mapping[str, Callable[[], int]]
    a: str = ""
    b: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    stats: dict[str, tuple[int, ...]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def tree(self) -> Path:
        """Return the build folder."""
        return self.folder / "build"

    @property
    def victim(self) -> Path:
        """Return a file outside the build folder, which links lead to."""
        return self.folder / "victim"

    def run(self, command: str) -> Outcome:
        """Run a command of the table in a fork."""
        script, *arguments = COMMANDS[command]
        names = {"A": self.a, "B": self.b, "NAME": Path(self.a).name}
        words = [names.get(word, word) for word in arguments]
        return run_forked(self.mains[script], [script, *words, "-O", str(self.tree)], self.folder)

    @property
    def kinds(self) -> dict[tuple[str, str], list[str]]:
        """Return the files by folder and name without numbers."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for file in self.files:
            parts = Path(file).parts
            run = "unfinished" if f"-s{UNFINISHED_SEED}-" in file else parts[0]
            inner = "/".join(parts[3:-1]) if len(parts) > 3 else ""
            name = parts[-1] if inner != "environment" else "a file"
            kind = f"{run}/{inner}".translate(_NO_DIGITS), name.translate(_NO_DIGITS)
            kinds.setdefault(kind, []).append(file)
        return kinds

    def commands_for(self, file: str) -> Sequence[str]:
        """Return the commands that read ``file``."""
        if f"-s{UNFINISHED_SEED}-" in file:
            return _UNFINISHED_COMMANDS
        if file.startswith("results/"):
            return _RUN_COMMANDS
        return _BUILD_COMMANDS if "/" not in file else _DATA_COMMANDS

    def protected(self, file: str) -> bool:
        """Return whether no command may change ``file``: a file of a finished run."""
        parts = Path(file).parts
        finished = len(parts) > 3 and parts[0] == "results" and f"-s{UNFINISHED_SEED}-" not in file
        return finished and not parts[-1].startswith(".lease-")

    def remember(self) -> None:
        """Store every file."""
        for name in scan(self.tree):
            self.files[name] = (self.tree / name).read_bytes()
            self.stats[name] = signature(self.tree / name)

    def check(self, case: Case) -> str:
        """Damage the file, run the command, restore the folder; return what went wrong, or ""."""
        target = self.tree / case.file
        mutations.apply(target, case.operations, self.victim)
        damaged = {name: signature(self.tree / name) for name in scan(self.tree)}
        try:
            outcome = self.run(case.command)
            return self._judge(case, outcome, damaged)
        finally:
            self.restore()

    def _judge(self, case: Case, outcome: Outcome, damaged: Mapping[str, tuple[int, ...]]) -> str:
        text = outcome.stdout + outcome.stderr
        if outcome.code is None:
            return f"hang: no end after {TIMEOUT_SECONDS:g} s"
        if "Traceback (most recent call last)" in text:
            return "traceback: " + text.rstrip().splitlines()[-1]
        if found := CONTROL_CHARACTER.search(text.translate({9: None, 10: None})):
            return f"control character {found[0]!r}"
        if outcome.code not in EXIT_CODES:
            return f"exit code {outcome.code}"
        if list(self.folder.rglob(mutations.CANARY)):
            return "code executed"
        if self.victim.read_text() != "victim":
            return "written through a link"
        after = {name: signature(self.tree / name) for name in scan(self.tree)}
        changed = [n for n, s in damaged.items() if self.protected(n) and after.get(n) != s]
        if changed:
            return f"changed: {changed[0]}"
        if case.command in self.figures and outcome.code == 0:
            return self._compare_figures(case, outcome)
        return ""

    def _compare_figures(self, case: Case, outcome: Outcome) -> str:
        """Return the first figure that changed if no message names the file or its run."""
        path = Path(case.file)
        if "results" not in path.parts or any(
            name in outcome.stderr + outcome.stdout for name in (path.name, *path.parts[2:3])
        ):
            return ""
        try:
            after = dict(figures(json.loads(outcome.stdout)))
        except ValueError:
            return "not JSON"
        before = self.figures[case.command]
        changed = [k for k in before if after.get(k, before[k]) != before[k]]
        return f"figure changed: {changed[0]}" if changed else ""

    def restore(self) -> None:
        """Undo the damage and what the command wrote."""
        for name in scan(self.tree):
            if name not in self.files or self.stats[name] != signature(self.tree / name):
                remove(self.tree / name)
        for folder, _, _ in os.walk(self.tree, topdown=False):
            place = Path(folder).relative_to(self.tree)
            if not any(Path(name).is_relative_to(place) for name in self.files):
                shutil.rmtree(folder)
        for name, content in self.files.items():
            path = self.tree / name
            if not os.path.lexists(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                self.stats[name] = signature(path)
        self.victim.write_text("victim")
        for canary in list(self.folder.rglob(mutations.CANARY)):
            remove(canary)


def figures(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield place and value of each number in a JSON document."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from figures(part, f"{place}/{key}")
    elif isinstance(value, int | float):
        yield place, value


def scan(folder: Path) -> Iterator[str]:
    """Yield the path of everything below ``folder`` that is not a folder."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        empty = not folders and not files
        for name in [*files, *links]:
            yield os.path.relpath(os.path.join(place, name), folder)
        if empty:
            yield os.path.relpath(place, folder)


def signature(path: Path) -> tuple[int, ...]:
    """Return what changes if ``path`` is written."""
    info = path.lstat()
    changed = 0 if stat.S_ISDIR(info.st_mode) else info.st_mtime_ns
    return info.st_ino, info.st_size, changed, info.st_mode


def remove(path: Path) -> None:
    """Remove a file, link or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def load_mains() -> dict[str, Callable[[], int]]:
    """Import the scripts of the commands, and torch, so that a fork starts at once."""
    sys.path.insert(0, str(ROOT / "scripts"))
    for library in ("gpt2.training.loop", "matplotlib.figure", "lib.report.plots"):
        importlib.import_module(library)
    mains: dict[str, Callable[[], int]] = {}
    for name, *_ in COMMANDS.values():
        if name in kablate.COMMANDS:
            importlib.import_module(kablate.COMMANDS[name].run.partition(":")[0])
            mains[name] = lambda: kablate.call(sys.argv[0], sys.argv[1:])
        else:
            mains[name] = importlib.import_module(name).main
    return mains


def run_forked(main: Callable[[], int], words: Sequence[str], folder: Path) -> Outcome:
    """Call the main function of a script in a fork, with a time limit."""
    process = start_forked(main, words, folder)
    code = None
    with os.fdopen(os.pidfd_open(process)) as ended:
        if select.select([ended], [], [], TIMEOUT_SECONDS)[0]:
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code is None:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    paths = folder / "stdout", folder / "stderr"
    return Outcome(code, *(path.read_text(encoding="utf-8", errors="replace") for path in paths))


def start_forked(main: Callable[[], int], words: Sequence[str], folder: Path) -> int:
    """Call the main function of a script in a fork of its own session; return the process id."""
    process = os.fork()
    if process:
        return process
    code = 70
    # If another test has computed with several threads, OpenMP waits forever for those threads, which
    # a fork does not have: also after set_num_threads, as soon as a number above 1 is set.
    torch.set_num_threads(1)
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = list(words)
        os.environ.update(ALLOW_DIRTY="y", NO_COLOR="1")
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
        console.run_main(main)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            sys.stderr.write(error.code)
    # The oracle reads the traceback of any defect.
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
