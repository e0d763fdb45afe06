"""No word or figure of a document on the disk is taken: each command computes the study anew."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_server import CommandServer, words_of
from tests.gpt2.records.test_hostile_strings import FORBIDDEN, HOSTILE, written_study

STUDY = ("--steps", "0,1", "--seeds", "1-4")
CLAIMS = """
study = "ratio"
[[claim]]
name = "pruned"
text = "pruning is worse"
contrast = "pruned-50 vs baseline"
verdict = "WORSE"
value = "+7.77"
"""
COMMANDS: dict[str, tuple[str, ...]] = {
    "verdicts": ("verdicts", *STUDY),
    "report": ("report", *STUDY, "--json"),
    "claims": ("claims", *STUDY),
    "status": ("status", *STUDY),
    "plan": ("plan", *STUDY),
    "ls": ("ls",),
}
INDEX = "results/index.html"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> dict[str, Any]:
    """Return what each command prints about two finished steps, the index, and the document."""
    folder = tmp_path_factory.mktemp("stored")
    build = folder / "build"
    written_study(build, "0,1", "1-4")
    (build / "claims.toml").write_text(CLAIMS)
    shown: dict[str, Any] = {name: run(server, build, folder, name)[:2] for name in COMMANDS}
    shown["index"] = (build / INDEX).read_text(encoding="utf-8")
    file = build / "results/ratio/verdicts.json"
    return {"build": build, "shown": shown, "file": file, "document": json.loads(file.read_text())}


def run(server: CommandServer, build: Path, scratch: Path, name: str) -> tuple[int, str, str]:
    script, *words = COMMANDS[name]
    command = [*words_of(script), *words, "-O", str(build)]
    return server.run(command, {**os.environ, "ALLOW_DIRTY": "y"}, scratch, build)


def forged(value: Any) -> Any:
    """Return a document with other words, numbers and texts, as hostile as possible."""
    if isinstance(value, dict):
        return {key: forged(part) for key, part in value.items()}
    if isinstance(value, list):
        return [forged(part) for part in value]
    if isinstance(value, str):
        return "WORSE" if value.isupper() else HOSTILE
    return 7.77 if isinstance(value, float) else value


def older(version: int) -> Callable[[Any], Any]:
    """Return a function that makes a forged document one of an earlier version."""

    def change(document: Any) -> Any:
        kept = ("verdicts", "aa_steps", "family", "metric", "rule", "looks", "study")
        parts = {key: part for key, part in document.items() if key in kept}
        return {**forged(parts), "schema_version": version}

    return change


FORGERIES: dict[str, Callable[[Any], Any]] = {
    "forged": lambda document: {**forged(document), "schema_version": document["schema_version"]},
    "version 1": older(1),
    "a later version": older(99),
    "other types": lambda document: dict.fromkeys(document, 7),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_command_takes_a_word_of_a_stored_document(
    name: str, before: dict[str, Any], server: CommandServer, tmp_path: Path
) -> None:
    """Each run of a command finds the forged document, also the one that writes it."""
    build, file = before["build"], before["file"]
    for command in COMMANDS:
        file.write_text(json.dumps(FORGERIES[name](before["document"])))
        code, out, err = run(server, build, tmp_path, command)
        assert "Traceback" not in err and not FORBIDDEN.search(out + err), err
        assert (code, out) == before["shown"][command], err
    assert (build / INDEX).read_text(encoding="utf-8") == before["shown"]["index"]


@pytest.mark.parametrize("content", ["", "[" * 20_000, "FIFO"])
def test_a_damaged_document_is_written_again(
    content: str, before: dict[str, Any], server: CommandServer, tmp_path: Path
) -> None:
    build, file = before["build"], before["file"]
    for command in ("verdicts", "claims", "report"):
        file.unlink()
        os.mkfifo(file) if content == "FIFO" else file.write_text(content)
        code, out, err = run(server, build, tmp_path, command)
        assert "Traceback" not in err and (code, out) == before["shown"][command], err
    assert json.loads(file.read_text()) == before["document"]


def test_looks_of_an_earlier_version_are_imported_without_their_words(
    before: dict[str, Any], server: CommandServer, tmp_path: Path
) -> None:
    build = Path(shutil.copytree(before["build"], tmp_path / "build"))
    file = build / before["file"].relative_to(before["build"])
    for version in (1, 3):
        for command in ("verdicts", "report", "claims"):
            file.with_name("declarations.jsonl").unlink(missing_ok=True)
            file.write_text(json.dumps(older(version)(before["document"])))
            code, out, err = run(server, build, tmp_path, command)
            assert "Traceback" not in err and code in (0, 1, 2, 4), err
            if command != "claims":
                assert "7.77" not in out and "WORSE" not in out
            else:
                assert code != 0


def test_two_directories_of_one_run_are_one_run(
    before: dict[str, Any], server: CommandServer, tmp_path: Path
) -> None:
    """A copy in the place of another seed is no second result, and a copy beside it none at all."""
    build = Path(shutil.copytree(before["build"], tmp_path / "build"))
    first, second = sorted((build / "results/ratio").glob("baseline-s[12]-*"))
    shutil.copytree(first, first.with_name(f"{first.name}-copy"))
    code, out, err = run(server, build, tmp_path, "verdicts")
    assert (code, out) == before["shown"]["verdicts"], err
    shutil.rmtree(second)
    shutil.copytree(first, second)
    code, out, err = run(server, build, tmp_path, "report")
    rows = {row["slug"]: row for row in json.loads(out)["rows"]}
    assert rows["baseline"]["n"] == 3 and "not comparable" in rows["baseline"]["state"]
    assert "Traceback" not in err and code == 0
