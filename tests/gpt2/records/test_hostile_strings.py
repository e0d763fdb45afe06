"""No string of a run or study folder reaches a terminal, or a table, with an escape or a line of its own."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from lib.files import write_json
from lib.runs.run_dir import RunDir
from tests.gpt2.study.large_study import write_large_study
from tests.lib.fabricated import seal
from tests.run_command import run_command

# Title of the window, colour, reversed text, clear the screen by one character, and a forged line.
HOSTILE = "x\x1b]0;t\x07\x1b[31mred\u202eevil\u2066\u200f\x9b2J\r\x85\u2028\nFORGED all is well"
FORBIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
STUDY = ("--steps", "STEPS", "--seeds", "SEEDS")
COMMANDS = {
    "plan": ("plan", *STUDY),
    "status": ("status", *STUDY),
    "one-line": ("status", *STUDY, "--one-line"),
    "watch": ("watch", *STUDY),
    "ls": ("ls",),
    "report": ("report", *STUDY),
    "named": ("report", "--run", "A"),
    "verdicts": ("verdicts", *STUDY),
    "audit": ("audit", "--runs", "*"),
    "audit as JSON": ("audit", "--runs", "*", "--json"),
    "verify-results": ("verify-results", *STUDY),
    "compare": ("compare", "A", "B"),
    "why": ("why", "DROPOUT", "--run", "A"),
}
# Of many texts, these list the first ones: a second folder has three runs.
FEW = ("status", "report", "verdicts", "audit", "verify-results", "compare")


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the key path of each string, and of a further key of each mapping."""
    if isinstance(value, dict):
        yield (*place, HOSTILE)
    items = value.items() if isinstance(value, dict) else ()
    for key, part in enumerate(value) if isinstance(value, list) else items:
        yield from leaves(part, (*place, key))
    if isinstance(value, str) or value is None:
        yield place


TEXTS = {"metrics": "eval", "per_query": "corpus/text-003", "timing": "written_at"}


def plant(run: RunDir, name: str, place: tuple[Any, ...]) -> None:
    """Write the hostile string into a file of a run; the manifest has the digest of the new file."""
    path: Path = attrgetter(name)(run)
    if place:
        document = target = json.loads(path.read_text(encoding="utf-8"))
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = next(iter(target.values()), 1) if place[-1] == HOSTILE else HOSTILE
        write_json(path, document)
    else:
        text = json.dumps(HOSTILE)[1:-1] if path.suffix == ".jsonl" else HOSTILE
        content = path.read_text(encoding="utf-8").replace(TEXTS.get(name, "a"), text)
        path.write_text(content, encoding="utf-8")
    if name != "manifest":
        record = json.loads(run.manifest.read_text(encoding="utf-8"))
        seal(run, {key: value for key, value in record.items() if key != "artifacts"})


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function from steps to their build folder: each run has a hostile string elsewhere."""

    @cache
    def build(steps: str) -> Path:
        folder = tmp_path_factory.mktemp("hostile") / "build"
        runs = write_large_study(folder, 3, steps=steps, iterations=20, documents=5)
        places: list[tuple[str, tuple[Any, ...]]] = [
            ("manifest", ("origin", "torch")),
            ("status", (HOSTILE,)),
            ("summary", ("final", "sparsity_by_layer", HOSTILE)),
        ]
        if steps != "0":
            places = [(name, ()) for name in (*TEXTS, "sample", "logs")]
            for name in ("manifest", "summary", "status", "resolved_config"):
                document = json.loads(attrgetter(name)(runs[0]).read_text(encoding="utf-8"))
                places += [(name, place) for place in leaves(document)]
        for i, run in enumerate(runs):
            plant(run, *places[i * len(places) // len(runs)])
        shutil.copytree(runs[0].path, runs[0].path.with_name(f"{HOSTILE}-s1-0123abcd"))
        return folder

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "name"),
    [*(("0-8", name) for name in COMMANDS), *(("0", name) for name in FEW)],
)
def test_no_command_prints_a_control_character_or_a_line_of_a_run(steps, name, hostile):
    """And ends as documented."""
    build = hostile(steps)
    runs = sorted((build / "results").glob("*/*-s1-*"))
    values = {"STEPS": steps, "SEEDS": "1-3", "A": str(runs[0]), "B": str(runs[-1])}
    script, *words = COMMANDS[name]
    words = [values.get(word, word) for word in words]
    code, out, err = run_command(script, *words, "-O", str(build))
    assert "Traceback" not in err and code in (0, 1, 2, 4, 6), err
    for text in (out, err):
        assert [line for line in text.splitlines() if FORBIDDEN.search(line)] == []
        assert re.findall(r"^FORGED.*", text, re.MULTILINE) == []
    if "JSON" in name:
        json.loads(out)
    if name == "report" and steps != "0":
        table = (build / "results/ratio/table.md").read_text(encoding="utf-8")
        assert "\\x1b" in table and not FORBIDDEN.search(table) and "\nFORGED" not in table
