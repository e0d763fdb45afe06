"""Commands of the documents: each is parsed and planned.

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
