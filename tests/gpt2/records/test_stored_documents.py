"""No word or figure of a document on the disk is taken: each command computes the study anew."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpt2.records.test_hostile_strings import FORBIDDEN, HOSTILE
from tests.gpt2.study.large_study import write_large_study
from tests.run_command import run_command

STUDY = ("--steps", "0,1", "--seeds", "1-3")
CLAIMS = """
study = "ratio"
[[claim]]
name = "pruned"
text = "pruning is worse"
contrast = "pruned-50 vs baseline"
verdict = "WORSE"
value = "+7.77"
"""
COMMANDS = {
    "verdicts": ("verdicts", *STUDY),
    "report": ("report", *STUDY, "--json"),
    "claims": ("claims", *STUDY),
    "status": ("status", *STUDY),
    "ls": ("ls",),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> dict[str, Any]:
    """Return what each command prints about two finished steps, the index, and the document."""
    folder = tmp_path_factory.mktemp("stored")
    build = folder / "build"
    write_large_study(build, 3, steps="0,1", iterations=20, documents=5)
    (build / "claims.toml").write_text(CLAIMS)
    shown = {name: run(build, name)[:2] for name in COMMANDS}
    file, index = build / "results/ratio/verdicts.json", build / "results/index.html"
    return {"build": build, "shown": shown, "file": file, "index": index.read_bytes()}


def run(build: Path, name: str) -> tuple[int, str, str]:
    script, *words = COMMANDS[name]
    return run_command(script, *words, "-O", str(build))


def forged(value: Any) -> Any:
    """Return a document with other words, numbers and texts, as hostile as possible."""
    if isinstance(value, dict):
        return {key: forged(part) for key, part in value.items()}
    if isinstance(value, list):
        return [forged(part) for part in value]
    if isinstance(value, str):
        return "WORSE" if value.isupper() else HOSTILE
    return 7.77 if isinstance(value, float) else value


def rewritten(change: Callable[[Any], Any]) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(change(json.loads(file.read_text()))))


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "forged": (rewritten(forged), tuple(COMMANDS)),
    "other types": (rewritten(lambda document: dict.fromkeys(document, 7)), ("verdicts",)),
    "deep": (lambda file: file.write_text("[" * 20_000), ("report",)),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), ("claims", "verdicts")),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_command_takes_a_word_of_a_stored_document(damage, before):
    """Each run of a command finds the damaged document, also the one that writes it."""
    change, commands = DAMAGES[damage]
    build, file = before["build"], before["file"]
    document = file.read_text()
    for command in commands:
        file.unlink()
        file.write_text(document)
        change(file)
        code, out, err = run(build, command)
        assert "Traceback" not in err and not FORBIDDEN.search(out + err), err
        assert (code, out) == before["shown"][command], err
    if damage != "forged":
        assert file.read_text() == document
    # Without the times that order the rows, which may have these digits.
    shown = re.sub(rb'data-v="[^"]*"', b"", before["index"])
    assert shown.startswith(b"<!doctype") and b"7.77" not in shown
    assert (build / "results/index.html").read_bytes() == before["index"]
    file.write_text(document)


@pytest.mark.slow
def test_two_directories_of_one_run_are_one_run(before, tmp_path):
    """A copy in the place of another seed is no second result, and a copy beside it none at all."""
    build = Path(shutil.copytree(before["build"], tmp_path / "build"))
    first, second = sorted((build / "results/ratio").glob("baseline-s[12]-*"))
    shutil.copytree(first, first.with_name(f"{first.name}-copy"))
    shutil.rmtree(second)
    shutil.copytree(first, second)
    code, out, err = run(build, "report")
    rows = {row["slug"]: row for row in json.loads(out)["rows"]}
    assert rows["baseline"]["n"] == 2 and "not comparable" in rows["baseline"]["state"]
    assert "Traceback" not in err and code == 0
