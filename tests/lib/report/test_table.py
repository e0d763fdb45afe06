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

OTHER_TORCH = {"origin__torch": "2.12.0"}
COMPILE = "knobs.torch_compile_enabled"


def document_from(runs, **options):
    return document_of(read_study("demo", runs, **options))


def states(document):
    return [row["state"] for row in document["rows"]]


@pytest.fixture
def pair(make_study):
    """Return one seed of a baseline and of a step that is 0.1 nats better."""
    return make_study({"base": [3.0], "wide": [2.9]})


def test_differences_are_those_of_equal_seeds(make_study):
    """The other seeds have a loss on one side only."""
    steps = {"base": [3.0, 4.0, None], "wide": [None, 3.7, 2.0]}
    base, wide = document_from(make_study(steps))["rows"]
    assert wide["delta_baseline"] == wide["delta_parent"] == pytest.approx(-0.3)
    assert wide["delta_baseline_n"] == 1
    assert base["state"] == wide["state"] == "2 of 3 done, new"


def test_holes_are_rows_with_their_reason(make_study):
    runs = make_study({"base": [3.0], "wide": [2.9], "late": [None], "other": [2.8]})
    write_status(RunDir(runs[1].path), RunStatus(State.FAILED, 1, "loss is NaN at it 7\nmore"))
    RunDir(runs[3].path).resolved_config.write_text('{"identity": {"name": "other"}}')
    seal(RunDir(runs[3].path), MANIFEST)
    document = document_of(read_study("demo", runs), left_out=["sgd: needs another"])
    assert states(document) == ["done", "failed", "new", "not comparable"]
    assert document["rows"][1]["val_loss"] is None and document["unigram_entropy"] == 3.145
    note = "demo/01-wide s1: failed: loss is NaN at it 7"
    assert document["notes"][0] == note and "identity differs" in document["notes"][1]
    assert "## Left out\n\n- sgd: needs another\n" in to_markdown(document)


def test_one_seed_is_marked_and_has_no_spread(pair):
    text = to_markdown(document_from(pair))
    assert "-0.1000 n=1" in text and "\nn=1: " in text and "SEEDS=1-3" in text
    assert not any(part in text for part in ("sparsity", "±", "p=", "p:", "Left out"))


def test_runs_that_differ_in_more_than_their_step_are_not_compared(make_run):
    """All fields are those of test_keys.py. Runs with the same reason are one note."""
    runs = [make_run("base", 3.0)]
    runs += [make_run(name, 2.0, parent="base", data="d2") for name in ("wide", "deep", "long")]
    document = document_from(runs)
    for row in document["rows"][1:]:
        assert row["state"] == "not comparable: data" and row["val_loss"] is None
        assert row["delta_baseline"] is None
    (note,) = document["notes"]
    assert note.startswith("demo/00-wide s1 and 2 more runs: not comparable: data: against ")


def test_a_label_keeps_rows_apart_that_differ_in_it(pair, make_run):
    runs = [*pair, make_run("base", 3.5, seed=2, manifest=OTHER_TORCH)]
    runs += [make_run("wide", 3.3, seed=2, parent="base", number=1, manifest=OTHER_TORCH)]
    document = document_from(runs, label_by=["torch"])
    assert [(r["slug"], r["labels"]["torch"], r["val_loss"]) for r in document["rows"]] == [
        ("base", "2.13.0", 3.0),
        ("wide", "2.13.0", 2.9),
        ("base", "2.12.0", 3.5),
        ("wide", "2.12.0", 3.3),
    ]
    # Each against the baseline of its own torch, never over both.
    assert [r["delta_baseline"] for r in document["rows"][1::2]] == pytest.approx([-0.1, -0.2])
    assert re.search(r"\| step +\| torch +\|", to_markdown(document))
    cells = [row["torch"] for row in csv.DictReader(io.StringIO(to_csv(document)))]
    assert cells[::2] == ["2.13.0", "2.12.0"]


@pytest.mark.parametrize(
    ("requested", "label_by", "expected"),
    [
        # As the axis of a matrix, which both runs request.
        (True, (), [("done", 2.9, pytest.approx(-0.1))]),
        (False, (), [(f"not comparable: {COMPILE}", None, None)]),
        (False, (COMPILE,), [("done", 2.9, None)]),
    ],
)
def test_compiled_and_eager_runs_are_compared_only_as_declared(
    make_run, requested, label_by, expected
):
    names = ["observed", "requested"] if requested else ["observed"]
    compiled = {f"knobs__torch_compile_enabled__{name}": True for name in names}
    runs = [make_run("compile-n", 3.0), make_run("compile-y", 2.9, manifest=compiled)]
    _, *rows = document_from(runs, label_by=label_by)["rows"]
    assert [(r["state"], r["val_loss"], r["delta_baseline"]) for r in rows] == expected
    assert [*rows[0]["labels"].values()] == ["True"] * len(label_by)


def test_quantized_weights_are_labelled_and_compared_as_declared(make_run):
    full, codes = (
        {"knobs__quantization_scheme": dict.fromkeys(("requested", "resolved", "observed"), scheme)}
        for scheme in ("none", "4bit_nf4")
    )
    codes["knobs__bnb_compute_dtype"] = dict.fromkeys(("requested", "resolved", "observed"), "fp32")
    runs = [make_run("base", 3.0, manifest=full)]
    assert "weights" not in to_markdown(document_from(runs))
    runs.append(make_run("lora", 2.9, parent="base", number=1, manifest=codes))
    document = document_from(runs)
    assert document["rows"][1]["delta_baseline"] == pytest.approx(-0.1)
    assert re.search(
        r"\| base +\| none +\| .*\| lora +\| 4bit_nf4 +\|", to_markdown(document), re.S
    )
    assert [row["weights"] for row in csv.DictReader(io.StringIO(to_csv(document)))] == [
        *("none", "4bit_nf4")
    ]
    # A run whose matrices were not stored as requested is no result of its step.
    codes["knobs__quantization_scheme"] = full["knobs__quantization_scheme"] | {"observed": "int8"}
    runs = [make_run("base", 3.0, manifest=full), make_run("fallen", 2.9, manifest=codes)]
    assert states(document_from(runs))[1] == "not comparable: knobs.quantization_scheme"


def test_a_label_does_not_excuse_what_it_does_not_name(make_run):
    other = OTHER_TORCH | {"origin__device": "another cpu"}
    runs = [make_run("base", 3.0), make_run("wide", 2.9, parent="base", manifest=other)]
    runs += [make_run("base", 3.0, seed=2, manifest=OTHER_TORCH)]
    document = document_from(runs, label_by=["torch"])
    assert states(document)[-1] == "not comparable: device"


@pytest.mark.parametrize(
    ("loss", "label", "code"),
    [(3.0, "weather", "usage.unknown-field"), (None, "torch", "run.not-found")],
)
def test_a_label_that_no_result_has_is_refused(make_run, loss, label, code):
    with pytest.raises(ConfigError) as caught:
        document_from([make_run("base", loss)], label_by=[label])
    assert caught.value.codes == [code] and label in str(caught.value)
    assert caught.value.problems[0].where == "LABEL_BY"


def test_runs_of_several_codes_stand_under_the_digest_of_what_they_share(pair, make_run):
    old = {"gpt2/train.py": "b" * 64, "gpt2/only_here.py": "c" * 64}
    runs = [*pair, make_run("base", 3.1, seed=2, manifest={"origin__sources": old})]
    document = document_from(runs, label_by=["code"])
    codes = [row["labels"]["code"] for row in document["rows"]]
    assert codes[0] == codes[1] != codes[2] and len(codes[0]) == 12
    assert states(document) == ["done"] * 3


def test_remarks_are_listed_even_if_all_runs_share_them(make_study):
    facts = {"code__changed_during_run": ["gpt2/train.py"], "oom_fallbacks": [{"action": "halve"}]}
    facts["earlier_divisions"] = [{"iterations": 5, "gpus": 2}]
    document = document_from(make_study({"base": [3.0], "w": [2.9]}, manifest=facts))
    assert states(document) == ["done", "done"]
    notes = [note for note in document["notes"] if note.startswith("demo/01-w s1: ")]
    assert len(notes) == 3
    assert notes[0].endswith(": gpt2/train.py") and "[{'action': 'halve'}]" in notes[1]
    assert notes[2].endswith("[{'gpus': 2, 'iterations': 5}]")


@pytest.mark.parametrize("file", ["summary", "logs", "manifest"])
def test_a_run_that_breaks_its_contract_is_no_result(make_run, file):
    run = make_run("base", 3.0)
    path = operator.attrgetter(file)(RunDir(run.path))
    text = path.read_text()
    path.write_text({"logs": "", "manifest": text.replace("d1", "d2")}.get(file, text + "\n"))
    document = document_from([run])
    assert states(document) == ["damaged"] and document["unigram_entropy"] is None
    assert path.name in document["notes"][0]


def test_unstable_runs_are_marked_in_rows_notes_and_verdicts(make_study):
    runs = make_study({"base": [3.01, 3.02]}, losses=(5.5, 3.2))
    spiked = (5.5, 5.0, 4.5, 4.0, 3.5, 3.2, 7.9, 3.1)
    runs += make_study({"wide": [3.01, 3.02]}, {"wide": "base"}, losses=spiked)
    document = document_from(runs)
    assert states(document) == ["done", "UNSTABLE"]
    (note,) = document["notes"]
    assert note.startswith("demo/00-wide s1 and 1 more run: UNSTABLE") and "it 7" in note
    (verdict,) = document["verdicts"]
    assert verdict["remarks"] == ["UNSTABLE: wide, seeds 1, 2"]
    assert shown(to_terminal(document, 80), colour=False).count("UNSTABLE") == 2


def test_a_reused_run_with_another_name_in_its_study_is_noted(make_run):
    run = make_run("base", 3.0)
    twin = replace(run, variant=replace(run.variant, slug="base-n"))
    (note,) = document_from([twin])["notes"]
    assert note.startswith("demo/00-base-n s1: ") and note.endswith(" demo/base-s1-base1")


@pytest.mark.parametrize("judged", [True, False])
def test_a_study_that_is_not_judged_has_differences_and_no_word(make_study, tmp_path, judged):
    runs = make_study({"base": (3.01, 3.02, 3.03), "wide": (2.911, 2.922, 2.933)})
    folder = tmp_path / "declared"
    plan = VerdictPlan(judged=judged, looks=LookPlan.fixed(3), folder=folder)
    document = document_from(runs, plan=plan)
    assert (folder / DECLARATIONS_FILE).exists() is judged and len(document["verdicts"]) == judged
    assert document["rows"][1]["delta_baseline"] == pytest.approx(-0.098)
    assert (NOT_JUDGED in document["notes"]) is not judged
    assert ("## Verdicts" in to_markdown(document)) is judged
    assert (NOT_JUDGED in to_markdown(document)) is not judged


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
    document = document_of(table)
    assert document["notes"] == [] and states(document) == ["done"] * 4
    differences = [row["delta_baseline"] for row in document["rows"]]
    assert differences == [None, pytest.approx(-0.098), None, pytest.approx(0.202)]
    names = [verdict["name"] for verdict in document["verdicts"]]
    assert names == ["512-b vs 512-a", "1024-b vs 1024-a"]
    # No row is the first one of all the others.
    assert "Δ reference" in to_markdown(document)
    assert "Δ: row - reference" in to_terminal(document, 80)
    references = [table.references(arm) for arm in table.outcomes]
    assert references == [("", ""), ("512-a", ""), ("", ""), ("1024-a", "")]


@pytest.mark.parametrize(("kind", "name"), [("baseline", "base"), ("parent", "wide")])
def test_nothing_is_compared_with_a_reference_that_has_a_diverged_seed(make_study, kind, name):
    """Its other seeds are those that went well: every rendering takes its differences from a row."""
    steps = {"base": [3.01, 3.02, 3.03], "wide": [3.11, 3.12, 3.13], "gate": [3.21, 3.22, 3.23]}
    steps[name].append(19.95)
    document = document_from(make_study(steps, {"gate": "wide"}))
    rows = {row["slug"]: row for row in document["rows"]}
    gate = rows["gate"]
    assert rows[name]["val_loss"] is None and gate["val_loss"] is not None
    (lost,) = (v for v in document["verdicts"] if v["name"] == gate["against"][kind])
    assert (lost["verdict"], lost["difference"], lost["interval_95"]) == ("DIVERGED", None, None)
    figures = {each: value for each, value in gate.items() if each.startswith("delta_")}
    assert [v for n, v in figures.items() if n.startswith(f"delta_{kind}")] == [None, None, 0]
    assert sum(value is not None for value in figures.values()) == 4


def test_bits_per_byte_are_those_of_all_bytes(make_study):
    """40 bytes have 31.4 nats, and 4 bytes have 9: the mean over documents is 1.65 times as large."""
    runs = make_study({"base": [3.0], "wide": [2.9]}, figures={"y": (9.0, 1, 1)})
    table = read_study("demo", runs, plan=VerdictPlan(unit=BITS_PER_BYTE))
    document, bits = document_of(table), (31.4 + 9.0) / 44 / math.log(2)
    base, wide = document["rows"]
    assert base["val_loss"] == wide["val_loss"] == pytest.approx(bits, rel=1e-12)
    assert wide["delta_baseline"] == 0 and base["perplexity"] is document["unigram_entropy"] is None
    text = to_markdown(document)
    assert "bits per byte" in text and "nats" not in text and "ppl" not in text
    # The last evaluation is scaled as the loss of the run is.
    evaluation = (31.4 + 9.0) / 11
    assert study_series(table)[1]["evaluation"]["mean"] == [pytest.approx(evaluation * bits / 2.9)]
    by_document = pytest.approx([31.4 / 40 / math.log(2), 9 / 4 / math.log(2)])
    assert [[*o.documents] for o in table.listed] == [by_document] * 2
