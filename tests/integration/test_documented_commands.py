"""Commands of the documents: each is parsed and planned, and most are run on a small study.

Blocks marked ``sh`` are run as written by ``test_worked_examples``.
"""

import re
import shlex
from collections.abc import Iterator

import pytest

from gpt2.study.arguments import asked_plan
from lib.commands import COMMANDS, VARIABLES, Command, variables_of
from lib.kablate import call
from lib.project import ROOT
from tests.integration.conftest import Folder
from tests.options import options

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CLAUDE.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]
_BLOCK = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A page begins with this configuration loaded.
_STUDY = "gpt2-ratio-small"
# Commands that are not run, even in a small form.
NOT_RUN = {
    "bench": "minutes, or a GPU: tests/integration/test_bench.py",
    "check": "minutes for a study: tests/integration/test_check.py",
    "claims": "needs the claims of the page: tests/integration/test_claims.py",
    "clean-runs": "asks",
    "completion": "a target of make alone: tests/test_makefile.py",
    "defconfig": "planned in the short form",
    "menuconfig": "needs a terminal: tests/lib/config/test_menuconfig.py",
    "randconfig": "another configuration: tests/test_makefile.py",
    "rerun": "asks",
    "setup": "installs packages: tests/lib/env/test_setup.py",
    "stop": "nothing runs: tests/integration/test_watch.py, test_slurm.py",
    "style": "of the tree: .ci",
    "test": "this",
    "validate-machine": "minutes: tests/gpt2/nsa",
    "verify-results": "needs a public commit: tests/integration/test_verify_results.py",
    "watch": "until none is running: tests/integration/test_watch.py",
}
# Words whose commands need a GPU, a network, a cluster, another environment or folders of a reader.
_ELSEWHERE = re.compile(
    "SUBMIT=y|GPUS?=[^1]|TRACKER_|SOURCE=wandb|SEEDS=auto|CUSTOM_PATH|DATASET_PATH|VERIFY=1|SWEEP="
    '|INIT_FROM="hf|1a2b3c4d|DIR|received|where/it|DEFCONFIG|RUNS=baseline,ra|CLAIMS|DATA=|WHERE='
    "|A=|PROBE|CONTINUE|RUN=reciprocal"
)
# Values for the small study.
_SMALLER = {
    "ITERS=240": "ITERS=2",
    "FROM=120": "FROM=2",
    "SEEDS=1-5": "SEEDS=1",
    "SEEDS=1-3": "SEEDS=1",
}


def commands(page: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield text, target and variables of each make command in the blocks of a page."""
    for block in _BLOCK.findall((ROOT / page).read_text()):
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            # A remark follows two spaces or a #.
            text = re.split(r"(?<=\S) {2,}| # ", line)[0]
            for part in text.split("&&"):
                words = shlex.split(part) if re.match(r" ?make\b", part) else [""]
                if words[0] == "make":
                    variables = dict(word.split("=", 1) for word in words[1:] if "=" in word)
                    targets = [word for word in words[1:] if "=" not in word]
                    for target in targets or ["all"]:
                        yield part.strip(), target, variables


def option_words(command: Command, variables: dict[str, str]) -> list[str]:
    """Return the variables of make as options or words; an empty variable counts as unset."""
    given = {VARIABLES[name]: value for name, value in variables.items() if value}
    options = [(v, value) for v, value in given.items() if v.name not in command.words]
    words = [v.option if v.kind == "flag" else f"{v.option}={value}" for v, value in options]
    return words + [value for v, value in given.items() if v.name in command.words]


@pytest.mark.parametrize("page", PAGES)
def test_each_command_is_read_and_planned(page, tmp_path):
    call("defconfig", [_STUDY, "-O", str(tmp_path)])
    for text, target, variables in commands(page):
        name, _, spec = target.partition("-")
        command = COMMANDS["defconfig" if name == "defconfig" else target]
        words = ["-O", str(tmp_path), *option_words(command, variables)]
        if name == "defconfig":
            assert call(name, [spec, *words]) == 0, text
            continue
        assert variables.keys() <= command.reads.keys(), text
        if command.run == "-":
            continue
        parsed = options(target, *words)
        if variables_of("@plan").keys() <= command.reads.keys() and "--seeds=auto" not in words:
            assert asked_plan(parsed).runs, text


@pytest.fixture
def study(build) -> Folder:
    """Return a folder with two steps of the RATIO study, of two seeds, trained."""
    folder = build(CHECKPOINT_KEEP_FINISHED=True, CHECKPOINT_INTERVAL=2, CPU_THREADS=1)
    code, _, said = folder.command("all", "--steps", "0,ra", "--seeds", "1-2")
    assert code == 0, said
    return folder


@pytest.mark.long
def test_each_command_runs_on_a_small_study(study):
    done, failed = set(), []
    for text, target, variables in (each for page in PAGES for each in commands(page)):
        name = target if target in COMMANDS else "defconfig"
        # A variable without a value is a placeholder.
        left_out = name in NOT_RUN or _ELSEWHERE.search(text)
        if left_out or text in done or not all(variables.values()):
            continue
        done.add(text)
        given = [f"{variable}={value}" for variable, value in variables.items()]
        smaller = [_SMALLER.get(word, word) for word in given]
        selected = dict(word.split("=", 1) for word in smaller)
        command = COMMANDS[name]
        if "OUT" in selected:
            selected["OUT"] = str(study.scratch / selected["OUT"])
        if {"STEPS", "SEEDS"} <= command.reads.keys() and "SINGLE_TRAINING" not in text:
            selected = {"STEPS": "0,ra", **selected}
        if name in ("prolong", "generate", "evaluate", "export"):
            selected = {"SEEDS": "1", **selected}
        code, _, said = study.command(name, *option_words(command, selected))
        if code:
            failed.append(f"{text}: exit {code}: {said[-300:]}")
    assert not failed, "\n".join(failed)
    assert len(done) > 20, sorted(done)
