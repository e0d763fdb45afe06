"""Arithmetic of the result table, and the results that it refuses to compare."""

import csv
import io
import math
import operator
import re
from dataclasses import replace

import pytest

from lib.console import shown
from lib.errors import ConfigError
from lib.report.columns import to_csv, to_markdown, to_terminal
from lib.report.declarations import DECLARATIONS_FILE, VerdictPlan
from lib.report.options import BITS_PER_BYTE, LookPlan
from lib.report.plots import study_series
from lib.report.study import NOT_JUDGED, read_study
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import MANIFEST, seal
from tests.lib.report.documents import document_of


def _row(table, slug):
    return next(row for row in document_of(table)["rows"] if row["slug"] == slug)


def test_one_seed_is_marked_and_has_no_spread(make_run):
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base")]
    document = document_of(read_study("demo", runs))
    assert document["unigram_entropy"] == 3.145
    text = to_markdown(document)
    assert "-0.1000 n=1" in text
    assert not any(part in text for part in ("sparsity", "±", "p=", "p:"))
    assert "\nn=1: " in text and "SEEDS=1-3" in text


def test_a_seed_that_one_side_lacks_does_not_count_in_the_difference(make_run):
    runs = [make_run("base", 3.0), make_run("base", seed=2)]
    runs += [make_run("wide", 2.9, parent="base"), make_run("wide", 2.0, seed=2, parent="base")]
    table = read_study("demo", runs)
    assert _row(table, "wide")["delta_baseline_n"] == 1
    assert _row(table, "wide")["delta_baseline"] == pytest.approx(-0.1)
    assert _row(table, "base")["state"] == "1 of 2 done, new"


def test_differences_are_those_of_equal_seeds(make_run):
    runs = [make_run("base", 3.0), make_run("base", 4.0, seed=2)]
    runs += [make_run("wide", 3.7, seed=2, parent="base")]
    row = _row(read_study("demo", runs), "wide")
    assert row["delta_baseline"] == row["delta_parent"] == pytest.approx(-0.3)


def test_holes_are_rows_with_their_reason(make_run):
    failed = make_run("wide", 2.9, parent="base")
    write_status(RunDir(failed.path), RunStatus(State.FAILED, 1, "loss is NaN at it 7\nmore"))
    table = read_study("demo", [make_run("base", 3.0), failed, make_run("late", parent="base")])
    assert _row(table, "wide")["state"] == "failed" and _row(table, "wide")["val_loss"] is None
    assert _row(table, "late")["state"] == "new"
    assert document_of(table)["notes"] == ["demo/00-wide s1: failed: loss is NaN at it 7"]


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"data": "d2"}, "data"),
        ({"manifest": {"origin__sources": {"gpt2/train.py": "b" * 64}}}, "code"),
        ({"manifest": {"origin__torch": ...}}, "torch"),
    ],
)
def test_runs_that_differ_in_more_than_their_step_are_not_compared(make_run, other, field):
    """All fields are those of test_keys.py. Runs with the same reason are one note."""
    runs = [make_run("base", 3.0)]
    runs += [make_run(name, 2.0, parent="base", **other) for name in ("wide", "deep", "long")]
    document = document_of(read_study("demo", runs))
    for row in document["rows"][1:]:
        assert row["state"] == f"not comparable: {field}" and row["val_loss"] is None
        assert row["delta_baseline"] is None
    (note,) = document["notes"]
    assert note.startswith(f"demo/00-wide s1 and 2 more runs: not comparable: {field}: against ")


def test_a_label_keeps_rows_apart_that_differ_in_it(make_run):
    other = {"manifest": {"origin__torch": "2.12.0"}}
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base")]
    runs += [make_run("base", 3.5, seed=2, **other)]
    runs += [make_run("wide", 3.3, seed=2, parent="base", **other)]
    table = read_study("demo", runs, label_by=["torch"])
    found = [(r["slug"], r["labels"]["torch"], r["val_loss"]) for r in document_of(table)["rows"]]
    assert found == [
        ("base", "2.13.0", 3.0),
        ("wide", "2.13.0", 2.9),
        ("base", "2.12.0", 3.5),
        ("wide", "2.12.0", 3.3),
    ]
    # Each against the baseline of its own torch, never over both.
    assert [r["delta_baseline"] for r in document_of(table)["rows"][1::2]] == pytest.approx(
        [-0.1, -0.2]
    )
    assert re.search(r"\| step +\| torch +\|", to_markdown(document_of(table)))
    cells = [row["torch"] for row in csv.DictReader(io.StringIO(to_csv(document_of(table))))]
    assert cells[::2] == ["2.13.0", "2.12.0"]
    assert document_of(table)["rows"][2]["labels"] == {"torch": "2.12.0"}


def test_compiled_and_eager_runs_are_compared_only_as_declared(make_run):
    """As the axis of a matrix, which both runs request, or apart, by a label."""
    compiled = {"knobs__torch_compile_enabled__observed": True}
    axis = compiled | {"knobs__torch_compile_enabled__requested": True}
    eager = make_run("compile-n", 3.0)
    table = read_study("demo", [eager, make_run("compile-y", 2.9, manifest=axis)])
    assert [row["state"] for row in document_of(table)["rows"]] == ["done", "done"]
    assert document_of(table)["rows"][1]["delta_baseline"] == pytest.approx(-0.1)
    runs = [eager, make_run("other", 2.8, manifest=compiled)]
    table = read_study("demo", runs)
    assert document_of(table)["rows"][1]["state"] == "not comparable: knobs.torch_compile_enabled"
    assert document_of(table)["rows"][1]["val_loss"] is None
    table = read_study("demo", runs, label_by=["knobs.torch_compile_enabled"])
    assert [[*row["labels"].values()] for row in document_of(table)["rows"]] == [
        ["False"],
        ["True"],
    ]
    row = document_of(table)["rows"][1]
    assert (row["val_loss"], row["delta_baseline"]) == (2.8, None)


def test_a_label_does_not_excuse_what_it_does_not_name(make_run):
    other = {"origin__torch": "2.12.0", "origin__device": "another cpu"}
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base", manifest=other)]
    runs += [make_run("base", 3.0, seed=2, manifest={"origin__torch": "2.12.0"})]
    table = read_study("demo", runs, label_by=["torch"])
    assert document_of(table)["rows"][-1]["state"] == "not comparable: device"
    with pytest.raises(ConfigError) as caught:
        read_study("demo", runs, label_by=["weather"])
    assert caught.value.codes == ["usage.unknown-field"]
    assert "LABEL_BY" in str(caught.value) and "'weather'" in str(caught.value)


def test_labels_without_a_result_are_refused(make_run):
    runs = [make_run("base"), make_run("wide", parent="base")]
    assert [row["state"] for row in document_of(read_study("demo", runs))["rows"]] == ["new", "new"]
    with pytest.raises(ConfigError) as caught:
        read_study("demo", runs, label_by=["torch"])
    assert caught.value.codes == ["run.not-found"]
    assert caught.value.problems[0].where == "LABEL_BY"


def test_runs_of_several_codes_stand_under_the_digest_of_what_they_share(make_run):
    old = {"gpt2/train.py": "b" * 64, "gpt2/only_here.py": "c" * 64}
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base")]
    runs += [make_run("base", 3.1, seed=2, manifest={"origin__sources": old})]
    table = read_study("demo", runs, label_by=["code"])
    codes = [row["labels"]["code"] for row in document_of(table)["rows"]]
    assert codes[0] == codes[1] != codes[2] and len(codes[0]) == 12
    assert [row["state"] for row in document_of(table)["rows"]] == ["done"] * 3


def test_remarks_are_listed_even_if_all_runs_share_them(make_run):
    facts = {"code__changed_during_run": ["gpt2/train.py"], "oom_fallbacks": [{"action": "halve"}]}
    facts["earlier_divisions"] = [{"iterations": 5, "gpus": 2}]
    runs = [
        make_run("base", 3.0, manifest=facts),
        make_run("w", 2.9, parent="base", manifest=facts),
    ]
    table = read_study("demo", runs)
    assert [row["state"] for row in document_of(table)["rows"]] == ["done", "done"]
    notes = [note for note in document_of(table)["notes"] if note.startswith("demo/00-w s1: ")]
    assert len(notes) == 3
    assert notes[0].endswith(": gpt2/train.py") and "[{'action': 'halve'}]" in notes[1]
    assert notes[2].endswith("[{'gpus': 2, 'iterations': 5}]")


def test_a_directory_of_another_configuration_is_not_compared(make_run):
    run = make_run("wide", 2.0, parent="base")
    RunDir(run.path).resolved_config.write_text('{"identity": {"name": "other"}}')
    seal(RunDir(run.path), MANIFEST)
    wide = _row(read_study("demo", [make_run("base", 3.0), run]), "wide")
    assert wide["state"] == "not comparable"


@pytest.mark.parametrize("file", ["summary", "logs", "manifest"])
def test_a_run_that_breaks_its_contract_is_no_result(make_run, file):
    run = make_run("base", 3.0)
    path = operator.attrgetter(file)(RunDir(run.path))
    text = path.read_text()
    path.write_text({"logs": "", "manifest": text.replace("d1", "d2")}.get(file, text + "\n"))
    table = read_study("demo", [run])
    assert (
        document_of(table)["rows"][0]["state"] == "damaged"
        and document_of(table)["unigram_entropy"] is None
    )
    assert path.name in document_of(table)["notes"][0]


def test_runs_of_other_code_are_marked(make_run):
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base")]
    table = read_study(
        "demo", runs, is_stale=lambda record: record.planned.label == "demo/00-wide s1"
    )
    assert _row(table, "wide")["state"] == "stale" and _row(table, "base")["state"] == "done"
    (note,) = document_of(table)["notes"]
    assert note.startswith("demo/00-wide s1: ")


def test_unstable_runs_are_marked_in_rows_notes_and_verdicts(make_run):
    spiked = (5.5, 5.0, 4.5, 4.0, 3.5, 3.2, 7.9, 3.1)
    runs = [
        make_run(slug, 3.0 + 0.01 * seed, seed=seed, parent=parent, losses=losses)
        for slug, parent, losses in (("base", "", (5.5, 3.2)), ("wide", "base", spiked))
        for seed in (1, 2)
    ]
    table = read_study("demo", runs)
    assert [_row(table, slug)["state"] for slug in ("base", "wide")] == ["done", "UNSTABLE"]
    (note,) = document_of(table)["notes"]
    assert note.startswith("demo/00-wide s1 and 1 more run: UNSTABLE") and "it 7" in note
    (verdict,) = table.judged["verdicts"]
    assert verdict["remarks"] == ["UNSTABLE: wide, seeds 1, 2"]
    assert shown(to_terminal(document_of(table), 80), colour=False).count("UNSTABLE") == 2


def test_what_was_left_out_is_listed_with_its_reason(make_run):
    reason = "sgd-state: PRUNING_STATE=y: needs OPTIMIZER_ADAMWPRUNE=y, which is n"
    table = read_study("demo", [make_run("base", 3.0)])
    document = document_of(table, left_out=[reason])
    assert f"## Left out\n\n- {reason}\n" in to_markdown(document)
    assert document["left_out"] == [reason]
    assert "Left out" not in to_markdown(document_of(read_study("demo", [make_run("lone", 3.0)])))


def test_a_reused_run_with_another_name_in_its_study_is_noted(make_run):
    run = make_run("base", 3.0)
    twin = replace(run, variant=replace(run.variant, slug="base-n"))
    notes = document_of(read_study("demo", [twin]))["notes"]
    (note,) = notes
    assert note.startswith("demo/00-base-n s1: ") and note.endswith(" demo/base-s1-base1")


def test_a_study_that_is_not_judged_has_differences_and_no_word(make_run, tmp_path):
    runs = [make_run("base", 3.0 + seed / 100, seed=seed) for seed in (1, 2, 3)]
    runs += [make_run("wide", 2.9 + seed / 90, seed=seed, parent="base") for seed in (1, 2, 3)]
    judged, speed = (
        read_study(
            "demo",
            runs,
            plan=VerdictPlan(judged=judged, looks=LookPlan.fixed(3), folder=tmp_path / str(judged)),
        )
        for judged in (True, False)
    )
    assert (tmp_path / "True" / DECLARATIONS_FILE).exists()
    assert not (tmp_path / "False").exists()
    assert len(judged.judged["verdicts"]) == 1 and not speed.judged["verdicts"]
    assert _row(speed, "wide")["delta_baseline"] == _row(judged, "wide")["delta_baseline"]
    assert NOT_JUDGED not in document_of(judged)["notes"]
    assert document_of(speed)["notes"] == [NOT_JUDGED]
    assert "## Verdicts" in to_markdown(document_of(judged))
    assert "## Verdicts" not in to_markdown(document_of(speed))
    assert NOT_JUDGED in to_markdown(document_of(speed))


def test_cells_of_a_grid_are_compared_with_the_first_that_predicts_their_text(make_run):
    """As those of two contexts; no loss of one context is subtracted from one of the other."""
    losses = {("512", "a"): 3.0, ("512", "b"): 2.9, ("1024", "a"): 2.5, ("1024", "b"): 2.7}
    runs = [
        make_run(
            f"{context}-{form}",
            loss + seed / 100 + (form == "b") * seed / 1000,
            seed=seed,
            number=number,
            levels={"BLOCK_SIZE": context, "FORM": form},
            documents=(context, "y"),
            text=f"BLOCK_SIZE={context}",
        )
        for number, ((context, form), loss) in enumerate(losses.items())
        for seed in (1, 2, 3)
    ]
    table = read_study("demo", runs)
    assert (
        document_of(table)["notes"] == []
        and [row["state"] for row in document_of(table)["rows"]] == ["done"] * 4
    )
    differences = [row["delta_baseline"] for row in document_of(table)["rows"]]
    assert differences == [None, pytest.approx(-0.098), None, pytest.approx(0.202)]
    names = [verdict["name"] for verdict in table.judged["verdicts"]]
    assert names == ["512-b vs 512-a", "1024-b vs 1024-a"]
    # No row is the first one of all the others.
    assert "Δ reference" in to_markdown(document_of(table))
    assert "Δ: row - reference" in to_terminal(document_of(table), 80)
    references = [table.references(arm) for arm in table.outcomes]
    assert references == [("", ""), ("512-a", ""), ("", ""), ("1024-a", "")]


@pytest.mark.parametrize("reference", ["base", "wide"])
def test_nothing_is_compared_with_a_reference_that_has_a_diverged_seed(make_run, reference):
    """Its other seeds are those that went well: every rendering takes its differences from a row."""
    runs = [
        make_run(slug, 3.0 + number / 10 + seed / 100, seed=seed, parent=parent, number=number)
        for number, (slug, parent) in enumerate([("base", ""), ("wide", "base"), ("gate", "wide")])
        for seed in range(1, 5)
    ]
    runs.append(make_run(reference, 19.95, seed=5, parent="base" * (reference == "wide")))
    runs[-1] = replace(
        runs[-1], variant=next(r.variant for r in runs if r.variant.slug == reference)
    )
    document = document_of(read_study("demo", runs))
    rows = {row["slug"]: row for row in document["rows"]}
    assert rows[reference]["val_loss"] is None and rows["gate"]["val_loss"] is not None
    kind = "baseline" if reference == "base" else "parent"
    (lost,) = (v for v in document["verdicts"] if v["name"] == rows["gate"]["against"][kind])
    assert (lost["verdict"], lost["difference"], lost["interval_95"]) == ("DIVERGED", None, None)
    figures = [value for name, value in rows["gate"].items() if name.startswith(f"delta_{kind}")]
    assert figures == [None, None, 0]
    other = {"baseline": "parent", "parent": "baseline"}[kind]
    assert rows["gate"][f"delta_{other}"] is not None


def test_bits_per_byte_are_those_of_all_bytes(make_run):
    """40 bytes have 31.4 nats, and 4 bytes have 9: the mean over documents is 1.65 times as large."""
    run = make_run("base", 3.0, figures={"y": (9.0, 1, 1)})
    (row,) = document_of(read_study("demo", [run], plan=VerdictPlan(unit=BITS_PER_BYTE)))["rows"]
    assert row["val_loss"] == pytest.approx((31.4 + 9.0) / 44 / math.log(2), rel=1e-12)


def test_a_table_in_bits_per_byte(make_run):
    """Documents x and y have 31.4 nats each, over 40 bytes."""
    runs = [make_run("base", 3.0, losses=(20.0, 3.1, 3.2)), make_run("wide", 2.9, parent="base")]
    table = read_study("demo", runs, plan=VerdictPlan(unit=BITS_PER_BYTE))
    base, wide = document_of(table)["rows"]
    bits = 31.4 / 40 / math.log(2)
    assert base["val_loss"] == wide["val_loss"] == pytest.approx(bits, rel=1e-12)
    assert wide["delta_baseline"] == 0 and base["perplexity"] is None
    assert document_of(table)["unigram_entropy"] is None
    # The last evaluation is the loss of the run, in the same unit.
    series = study_series(table)[1]
    assert series["evaluation"]["mean"] == [pytest.approx(3.14 * bits / 2.9)]
    assert [o.documents for row in table.outcomes.values() for o in row] == [
        (pytest.approx(bits),) * 2
    ] * 2
