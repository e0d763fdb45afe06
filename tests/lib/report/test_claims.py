"""Claims against the documents of fabricated runs: numbers, words, damaged and missing runs."""

import re

import pytest

from lib.errors import ConfigError
from lib.report.claims import (
    check_claims,
    claim_lines,
    claims_exit_code,
    claims_to_latex,
    claims_to_markdown,
    read_claims,
)
from lib.report.declarations import VerdictPlan
from lib.report.statistics import VerdictRule
from lib.report.study import read_study
from tests.lib.report.documents import document_of


@pytest.fixture
def runs(make_study):
    """Return three seeds of a baseline and of a step that is 0.1 nats better."""
    return make_study({"base": (3.0, 3.25, 2.875), "wide": (2.899, 3.152, 2.7745)})


@pytest.fixture
def check(tmp_path):
    """Return a function that checks entries, each the TOML of a claim without its name."""

    def checked(planned, *entries, head="", **changes):
        path = tmp_path / "claims.toml"
        texts = [f'[[claim]]\nname = "c-{n}"\n{entry}' for n, entry in zip("abcdef", entries)]
        path.write_text(head + "".join(texts))
        study = read_study("demo", planned, plan=VerdictPlan(VerdictRule(band=0.05)))
        return check_claims(read_claims(path), document_of(study) | changes)

    return checked


def toml(**keys):
    return "".join(f"{key} = '{text}'\n" for key, text in {"text": "t", **keys}.items())


def contrast(value="-0.10", verdict="BETTER", **more):
    return toml(**{"contrast": "wide vs base", "verdict": verdict, "value": value, **more})


def figure(value, field="val_loss", **more):
    return toml(**{"step": "base", "field": field, "value": value, **more})


def test_true_claims_hold_and_false_ones_are_named_with_quoted_and_found(runs, check):
    entries = [contrast(), figure("3.042"), figure("61", "train_seconds")]
    claims = check(runs, *entries, figure("1,000", "parameters"))
    assert [claim["problems"] for claim in claims] == [[]] * 4 and claims_exit_code(claims) == 0
    assert [len(claim["runs"]) for claim in claims] == [6, 3, 3, 3]
    lines = ["HOLDS   c-a: -0.10 BETTER", "HOLDS   c-b: 3.042"]
    assert claim_lines(claims).splitlines()[:2] == lines
    false = [
        (contrast("-0.11"), "-0.11", "-0.10"),
        (contrast(verdict="WORSE"), "WORSE", "BETTER"),
        (contrast(verdict="INCONCLUSIVE"), "INCONCLUSIVE", "BETTER"),
        (figure("3.043"), "3.043", "3.042"),
    ]
    first, *claims = check(runs, figure("3.042"), *(entry for entry, _, _ in false))
    for claim, (_, quoted, found) in zip(claims, false, strict=True):
        (problem,) = claim["problems"]
        assert quoted in problem and found in problem and claims_exit_code([first, claim]) == 1
    assert re.search(r"FAIL    c-b: .*claims.toml:7", claim_lines(claims))


def test_a_claim_without_its_runs_does_not_hold(runs, check, make_run):
    """Neither if there are none, nor if one seed has no result, or is damaged."""
    for claim in check(runs, contrast(), figure("3.042"), runs=[]):
        assert claim["problems"] == ["no run of it is planned"]
        assert claims_exit_code([claim]) == 1
    (claim,) = check([*runs, make_run("base", seed=7)], figure("3.042"))
    assert claim["problems"] == ["base-s7-base7: new"]
    path = runs[2].path / "summary.json"
    path.write_bytes(b"[" + path.read_bytes()[1:])
    for claim in check(runs, contrast(), figure("3.042")):
        assert claims_exit_code([claim]) == 4
        assert any(runs[2].path.name in problem for problem in claim["problems"])


@pytest.mark.parametrize(
    ("entry", "head", "code"),
    [
        (contrast(contrast="wide vs bse"), "", "claims.unknown-contrast"),
        (figure("1", step="bse"), "", "claims.unknown-step"),
        (figure("1", "state"), "", "claims.unknown-field"),
        (figure("1"), 'study = "ratio"\n', "claims.other-study"),
    ],
)
def test_a_claim_on_nothing_that_is_planned_is_an_error(runs, check, entry, head, code):
    with pytest.raises(ConfigError) as caught:
        check(runs, entry, head=head)
    assert caught.value.codes == [code] and "claims.toml" in caught.value.problems[0].where


def test_the_document_must_quote_the_number(runs, check, tmp_path):
    page = tmp_path / "page.md"
    for text, quoted in (("it is 3.04.", True), ("13.04, 3.041, −3.04", False)):
        page.write_text(text)
        (claim,) = check(runs, figure("3.04", document="page.md"))
        assert claims_exit_code([claim]) == (0 if quoted else 1)


def test_tables_name_run_ids_commits_and_configurations(runs, check):
    claims = check(runs, contrast(), figure("3.042"))
    latex, markdown = claims_to_latex(claims), claims_to_markdown(claims)
    for text in (latex, markdown):
        for run in runs:
            assert f"{run.path.name} (unknown)" in text
        assert f"commit {'0' * 12}" in text and "BETTER" in text
        assert re.search(r"-0\.(09|10)\d\d (±|\\ensuremath{\\pm}) 0\.00\d\d", text)
    assert re.findall(r"newcommand\{\\([^}]*)\}", latex) == ["claimCA", "claimCB", "claimstable"]
    assert r"\newcommand{\claimCA}{-0.10}" in latex and latex.count("{") == latex.count("}")


GOOD = """study = "demo"
seeds = "1-3"

[[claim]]
name = "wide"
text = "a wider MLP"
contrast = "wide vs base"
verdict = "BETTER"
value = "-0.10"

[[claim]]
name = "loss-two"
text = "loss"
step = "base"
field = "val_loss"
value = "3.00"
"""


@pytest.mark.parametrize(
    ("line", "replacement", "code", "number"),
    [
        ('value = "-0.10"', "value = -0.10", "invalid-value", 9),
        *(
            ('value = "-0.10"', f'value = "{other}"', "invalid-form", 9)
            for other in ("-0.10 nats", "−0.10", "1000", "7.9k", "47.5%", ".10", "1.")
        ),
        ('value = "-0.10"', 'value = "-0.10', "syntax", 9),
        ('value = "-0.10"', 'valu = "-0.10"', "unknown-key", 9),
        ('verdict = "BETTER"', 'verdict = "UNFAIR"', "invalid-form", 8),
        ('verdict = "BETTER"\n', "", "missing-key", 4),
        ('contrast = "wide vs base"\n', "", "missing-key", 4),
        ('contrast = "wide vs base"', 'contrast = "x"\nstep = "base"', "missing-key", 4),
        *(('name = "wide"', f'name = "{name}"', "invalid-form", 5) for name in ("wide_", "Wide")),
        ('name = "wide"', 'name = "loss-two"', "duplicate", 11),
        ('text = "a wider MLP"\n', "", "missing-key", 4),
        ('value = "3.00"\n', "", "missing-key", 11),
        ('field = "val_loss"\n', "", "missing-key", 11),
        ('seeds = "1-3"', "seeds = 3", "invalid-value", 2),
        ('seeds = "1-3"', 'seed = "3"', "unknown-key", 2),
        (GOOD, 'claim = "x"\n', "invalid-value", 1),
        (GOOD, "claim = [1]\n", "invalid-value", 1),
    ],
)
def test_a_wrong_entry_names_its_line(tmp_path, line, replacement, code, number):
    assert GOOD.count(line) == 1
    path = tmp_path / "claims.toml"
    path.write_text(GOOD)
    assert [claim["name"] for claim in read_claims(path)["claims"]] == ["wide", "loss-two"]
    path.write_text(GOOD.replace(line, replacement))
    with pytest.raises(ConfigError) as caught:
        read_claims(path)
    assert caught.value.exit_code == 2
    lines = [(p.code, int(p.where.rpartition(":")[2] or 1)) for p in caught.value.problems]
    assert any(kind == f"claims.{code}" and abs(at - number) <= 1 for kind, at in lines), lines


NUMBERS = [
    *(("-0.0062", -0.00624, True), ("+0.10", 0.0999, True), ("2.4759", 2.475949, True)),
    *(("-0", -0.4, True), ("-0.0000", -0.00001, True), ("+0.0000", 0.0, True)),
    *(("122,880", 122880.0, True), ("0.475", 0.475, True)),
    *(("-0.0062", 0.0062, False), ("-0.0062", -0.00626, False), ("0.10", -0.1, False)),
    *(("2.4759", 2.47596, False), ("-0.0000", 0.00001, False), ("+0.0000", -0.00001, False)),
    *(("0.00620", 0.00624, False), ("122,880", 122881.0, False), ("0.10", None, False)),
]


@pytest.mark.parametrize(("text", "recorded", "holds"), NUMBERS)
def test_a_number_holds_if_it_has_the_quoted_digits_and_sign(
    make_run, check, text, recorded, holds
):
    row = {"name": "base", "slug": "base", "machine": {}, "val_loss": recorded}
    (claim,) = check([make_run("base", 3.0)], figure(text), rows=[row])
    assert bool(claim["problems"]) is not holds
