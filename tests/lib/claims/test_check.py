"""Claims against fabricated runs: numbers, verdicts, damaged and missing records."""

import random
import re
import shutil
import subprocess

import pytest

from lib.claims.check import check_claims, claims_exit_code
from lib.claims.file import read_claims
from lib.claims.render import (
    claim_lines,
    claims_to_json,
    claims_to_latex,
    claims_to_markdown,
    latex_text,
    require_latex,
)
from lib.errors import ConfigError
from lib.report.contrast_tests import VerdictRule
from lib.report.study_verdicts import VerdictPlan
from lib.report.table import build_table
from lib.runs.run_dir import RunDir

BASE = (3.0, 3.25, 2.875)
HOSTILE = r"50% of A_B & #1 {x} ~ ^2 \cmd $5 −0.1 a--b <c> |d| \"e\" 'f' `g` β ü"


@pytest.fixture
def runs(make_run):
    """Return three seeds of a baseline and of a step that is 0.1 nats better."""
    draw, runs = random.Random(3), []
    for seed, base in enumerate(BASE, 1):
        runs.append(make_run("base", base, seed=seed, number=0))
        loss = base - 0.1 + draw.gauss(0, 0.002)
        runs.append(make_run("wide", loss, seed=seed, parent="base", number=1))
    return runs


@pytest.fixture
def checked(tmp_path):
    """Return a factory of checked claims; each is the TOML of one entry without its name."""

    def check(runs, *entries, head=""):
        path = tmp_path / "claims.toml"
        texts = [f'[[claim]]\nname = "c{i}"\n{entry}\n' for i, entry in enumerate(entries)]
        path.write_text(head + "".join(texts))
        file = read_claims(path)
        plan = VerdictPlan(VerdictRule(band=0.05))
        return file, check_claims(file, build_table("demo", runs, verdict_plan=plan), runs)

    return check


def contrast(value="-0.10", verdict="BETTER", **more):
    keys = {"text": "t", "contrast": "wide vs base", "verdict": verdict, "value": value, **more}
    return "".join(f"{key} = '{text}'\n" for key, text in keys.items())


def cell(value, field="val_loss", seed="seed = 2, ", **more):
    keys = {"text": "t", "value": value, **more}
    text = "".join(f"{key} = '{text}'\n" for key, text in keys.items())
    return f"{text}cell = {{ run = 'base', {seed}field = '{field}' }}\n"


def test_true_claims_hold(runs, checked):
    span = cell("11.6", "train_loss").replace("train_loss'", "train_loss', iterations = [1, 2]")
    _, results = checked(
        runs, contrast(), cell("3.250"), cell("3.042", seed=""), cell("61 s", "train_seconds"), span
    )
    assert [r.problems for r in results] == [()] * 5
    assert claims_exit_code(results) == 0
    assert len(results[0].runs) == 6 and len(results[1].runs) == 1 and len(results[2].runs) == 3


@pytest.mark.parametrize(
    ("entry", "quoted", "found"),
    [
        (contrast("-0.11"), "-0.11", "-0.10"),
        (contrast("0.10"), "0.10", "-0.10"),
        (contrast(verdict="WORSE"), "WORSE", "BETTER"),
        (contrast(verdict="INCONCLUSIVE"), "INCONCLUSIVE", "BETTER"),
        (cell("3.251"), "3.251", "3.250"),
        (cell("3.25", digest="0" * 16), "0" * 16, ""),
        (contrast(digest="0" * 16), "0" * 16, ""),
    ],
)
def test_a_false_claim_is_named_with_quoted_and_found(runs, checked, entry, quoted, found):
    _, results = checked(runs, cell("3.25"), entry)
    assert [r.holds for r in results] == [True, False] and claims_exit_code(results) == 1
    (problem,) = results[1].problems
    assert quoted in problem and found in problem
    lines = claim_lines(results)
    assert "FAIL    c1: " in lines and f"{results[1].claim.where}, " in lines


@pytest.mark.parametrize("entry", [contrast(), cell("3.25")])
def test_the_digest_is_that_of_the_records(runs, checked, entry, make_run):
    _, (first,) = checked(runs, entry)
    _, (again,) = checked(runs[::-1], entry.replace("text", f"digest = '{first.digest}'\ntext"))
    assert again.holds and again.digest == first.digest
    runs[2] = make_run("base", 3.2501, seed=2)
    _, (changed,) = checked(runs, entry.replace("text", f"digest = '{first.digest}'\ntext"))
    assert not changed.holds and changed.digest != first.digest


@pytest.mark.parametrize("entry", [contrast(), cell("3.25"), cell("3.042", seed="")])
@pytest.mark.parametrize(
    "name", ["summary.json", "per_query.csv", "model.safetensors", "status.json"]
)
def test_a_damaged_run_is_named_and_its_claims_do_not_hold(runs, checked, entry, name):
    path = runs[2].path / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    _, results = checked(runs, entry, cell("3.00", seed="seed = 1, "))
    assert [r.holds for r in results] == [False, True]
    assert claims_exit_code(results) == 4 and results[0].value is None
    assert any(runs[2].path.name in problem for problem in results[0].problems)


def test_runs_that_are_not_comparable(runs, checked, make_run):
    runs[1] = make_run("wide", 2.9, seed=1, parent="base", number=1, data="d2")
    _, (result,) = checked(runs, contrast())
    assert result.problems == ("not comparable: data",) and claims_exit_code([result]) == 4


def test_missing_runs(runs, checked, make_run):
    runs[2] = make_run("base", seed=7)
    _, results = checked(runs, cell("3.25", seed="seed = 7, "), cell("3.042", seed=""))
    assert all("not finished: base-s7" in r.problems[0] for r in results)
    assert claims_exit_code(results) == 1
    _, (few,) = checked(runs[:2], contrast())
    assert "found none" in few.problems[0] and claims_exit_code([few]) == 1


@pytest.mark.parametrize(
    ("entry", "head", "code"),
    [
        (contrast(contrast="wide vs bse"), "", "claims.unknown-contrast"),
        (cell("1").replace("base", "bse"), "", "claims.unknown-run"),
        (cell("1", seed="seed = 9, "), "", "claims.unknown-seed"),
        (cell("1"), 'study = "ratio"\n', "claims.other-study"),
        (cell("1") + 'documents = ["none.md"]\n', "", "claims.unreadable-document"),
    ],
)
def test_a_claim_on_nothing_that_is_planned_is_an_error(runs, checked, entry, head, code):
    with pytest.raises(ConfigError) as caught:
        checked(runs, entry, head=head)
    assert caught.value.codes == [code] and "claims.toml" in caught.value.problems[0].where


def test_documents_must_quote_the_number(runs, checked, tmp_path):
    page = tmp_path / "page.md"
    entry = cell("3.25") + 'documents = ["page.md"]\n'
    for text, holds in (("it is 3.25.", True), ("13.25, 3.251, −3.25", False), ("3.25\n", True)):
        page.write_text(text)
        _, (result,) = checked(runs, entry)
        assert result.holds is holds and claims_exit_code([result]) == (0 if holds else 1)


def test_outputs_are_deterministic_and_have_the_provenance(runs, checked):
    entries = contrast(), cell("3.25")
    first = [f(*checked(runs, *entries)) for f in (claims_to_latex, claims_to_markdown)]
    again = [f(*checked(runs[::-1], *entries)) for f in (claims_to_latex, claims_to_markdown)]
    assert first[1] == again[1]
    for text in first:
        assert all(run.path.name in text for run in runs)
        assert "0" * 12 in text and "seeds: 1, 2, 3" in text
    commands = re.findall(r"newcommand\{\\([^}]*)\}", first[0])
    assert all(re.fullmatch("[A-Za-z]+", name) for name in commands)
    assert {"claimCZero", "claimCZeroLow", "claimCOne"} < set(commands)
    assert claims_to_json(*checked(runs, *entries), []) == claims_to_json(
        *checked(runs, *entries), []
    )


def test_every_character_is_escaped_or_refused(runs, checked):
    escaped = latex_text(HOSTILE)
    plain = re.sub(r"\\ensuremath\{[^{}]*\}|\\text[a-z]+\{\}|\\[%_&#{}$]|~", "", escaped)
    assert not re.search(r"[%_&#$^\\~<>|]|--", plain)
    file, _ = checked(runs, contrast(text="漢字"))
    with pytest.raises(ConfigError) as caught:
        require_latex(file)
    assert caught.value.codes == ["claims.unsupported-character"]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.slow
def test_latex_compiles(runs, checked, tmp_path):
    entries = contrast(text=HOSTILE.replace("'", "")), cell("3.25"), cell("61.0 s", "train_seconds")
    (tmp_path / "claims.tex").write_text(claims_to_latex(*checked(runs, *entries)))
    (tmp_path / "paper.tex").write_text(
        r"\documentclass{article}\usepackage[utf8]{inputenc}\usepackage{booktabs}\input{claims}"
        r"\begin{document}It is \claimCZero{} nats, $\claimCZeroLow$.\par\claimstable\end{document}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Missing character" not in (tmp_path / "paper.log").read_text(errors="replace")


def test_a_record_is_only_read(runs, checked):
    before = {path: path.read_bytes() for path in RunDir(runs[0].path).path.rglob("*")}
    checked(runs, contrast())
    assert {path: path.read_bytes() for path in RunDir(runs[0].path).path.rglob("*")} == before
