"""Every fact that can change a loss makes runs incomparable by name, or separates them by label.

One run is a copy of the other that differs in one fact.
"""

import pytest

from lib.report.columns import to_markdown
from lib.report.compare import compare_runs
from lib.report.options import BITS_PER_BYTE
from lib.report.run_facts import observed_differences
from lib.report.study import read_study
from lib.runs.record import RunRecord
from lib.runs.run import Run, RunVariant
from tests.lib.fabricated import DOCUMENTS, IDENTITY, MANIFEST, changed, digest_of, write_run
from tests.lib.report.documents import document_of

# Knobs missing from the fabricated manifest.
KNOBS = {
    "quantization_scheme": "none",
    "allow_tf32_matmul": False,
}
WHOLE = changed(
    MANIFEST,
    **{
        f"knobs__{name}": {"requested": value, "resolved": value, "observed": value}
        for name, value in KNOBS.items()
    },
)
# Difference → changed values, and the field to be reported.
SETTINGS = {
    "compiler": ({"machine__compile": True}, "machine.compile"),
    "precision": ({"machine__precision": "bf16"}, "machine.precision"),
    "attention kernel": ({"model__attention__backend": "math"}, "model.attention.backend"),
    "profile": ({"repro__profile": "maxout_speed"}, "repro.profile"),
    # Evaluations are read in the micro-batches of training.
    "evaluation batch": ({"train__batch_size": 4}, "train.batch_size"),
}
FACTS = {
    "quantization": ({"knobs__quantization_scheme__observed": "int8"}, "knobs.quantization_scheme"),
    "TF32": ({"knobs__allow_tf32_matmul__observed": True}, "knobs.allow_tf32_matmul"),
    "memory that ran out": ({"oom_fallbacks": [{"action": "halve"}]}, "oom_fallbacks"),
    "divisions": ({"earlier_divisions": [{"iterations": 5, "gpus": 2}]}, "earlier_divisions"),
    "threads": ({"knobs__cpu_threads__observed": 2}, "knobs.cpu_threads"),
    "torch": ({"origin__torch": "2.12.0"}, "torch"),
}


@pytest.fixture
def forged(tmp_path):
    """Return a factory of a run and a copy that differs only in ``name``; equal without a name."""

    def make(name=""):
        settings, facts = SETTINGS.get(name, ({},))[0], FACTS.get(name, ({},))[0]
        a = write_run(tmp_path / "a", manifest=WHOLE)
        identity, manifest = changed(IDENTITY, **settings), changed(WHOLE, **facts)
        return a, write_run(tmp_path / "b", identity=identity, manifest=manifest)

    return make


def verdict(pair, labels=()):
    return compare_runs(*(RunRecord(run) for run in pair), {}, [], labels)


@pytest.mark.parametrize("name", [*SETTINGS, *FACTS])
def test_two_runs_that_differ_in_it_are_refused_or_labelled(forged, name):
    field = (SETTINGS | FACTS)[name][1]
    found = verdict(forged(name))
    assert found["verdict"] == "NOT COMPARABLE"
    assert [reason.split(":")[0] for reason in found["reasons"]] == [field] and found[
        "losses"
    ] is None
    labelled = verdict(forged(name), [field])
    assert labelled["verdict"] == "COMPARED" and labelled["labels"][0].startswith(f"{field}: ")


def test_two_runs_that_differ_in_nothing_pass(forged):
    assert verdict(forged())["verdict"] == "BITWISE"


@pytest.mark.parametrize("name", FACTS)
def test_a_table_has_no_figures_for_it_or_a_column_of_its_own(forged, name):
    field = FACTS[name][1]

    class Planned:
        digest = digest_of(IDENTITY)
        hash8 = "0123abcd"

        def identity(self):
            return IDENTITY

    runs = [
        Run("demo", RunVariant(slug, parent=parent), 1, Planned(), run.path)
        for run, slug, parent in zip(forged(name), ("base", "wide"), ("", "base"), strict=True)
    ]
    base, wide = document_of(read_study("demo", runs))["rows"]
    assert (base["state"], wide["state"]) == ("done", f"not comparable: {field}")
    assert wide["val_loss"] is None and wide["delta_baseline"] is None
    table = read_study("demo", runs, label_by=[field])
    assert [row["state"] for row in document_of(table)["rows"]] == ["done", "done"]
    values = [row["labels"][field] for row in document_of(table)["rows"]]
    # Side by side, and never subtracted.
    assert values[0] != values[1] and document_of(table)["rows"][1]["delta_baseline"] is None
    head = next(
        line for line in to_markdown(document_of(table)).splitlines() if line.startswith("|")
    )
    assert field in head.replace("|", " ").split()


@pytest.mark.parametrize("documents", [DOCUMENTS, {**DOCUMENTS, "z": (20.0, 5, 10)}])
def test_another_training_text_is_comparable_on_the_same_documents(tmp_path, documents):
    """What was read and how it was split follow from the declared path; the documents do not."""
    facts = {"data__digest": "d2", "data__split": {"id": "s2"}}
    runs = [
        write_run(tmp_path / path, identity=identity, manifest=manifest, documents=evaluated)
        for path, identity, manifest, evaluated in (
            ("a", changed(IDENTITY, data={"custom_path": "a"}), WHOLE, DOCUMENTS),
            ("b", changed(IDENTITY, data={"custom_path": "b"}), changed(WHOLE, **facts), documents),
        )
    ]
    left, right = map(RunRecord, runs)
    differing = [each.field for each in observed_differences(left, right)]
    assert differing == ([] if documents is DOCUMENTS else ["documents"])
    compared = compare_runs(left, right, {}, ["data.custom_path", "documents"])
    assert (compared["losses"] is not None) == (documents is DOCUMENTS)


def test_another_training_text_of_one_path_is_refused(tmp_path):
    a = write_run(tmp_path / "a", manifest=WHOLE)
    b = write_run(tmp_path / "b", manifest=changed(WHOLE, data__digest="d2"))
    fields = [each.field for each in observed_differences(*map(RunRecord, (a, b)))]
    assert fields == ["data"]


@pytest.mark.parametrize("size", [10, 11])
def test_two_tokenizers_are_comparable_in_bits_per_byte_of_the_same_bytes(tmp_path, size):
    facts = {"data__digest": "d2", "data__tokenizer": {"digest": "t2"}}
    a, b = (
        RunRecord(write_run(tmp_path / name, **given))
        for name, given in (
            ("a", {"identity": changed(IDENTITY, data={"tokenizer": "byte"}), "manifest": WHOLE}),
            (
                "b",
                {
                    "identity": changed(IDENTITY, data={"tokenizer": "gpt2"}),
                    "manifest": changed(WHOLE, **facts),
                    # Four bytes each.
                    "documents": {**DOCUMENTS, "y": (29.0, 6, size)},
                },
            ),
        )
    )
    differing = [each.field for each in observed_differences(a, b, BITS_PER_BYTE)]
    assert differing == ([] if size == DOCUMENTS["y"][2] else ["text"])
    assert "tokenizer" in [each.field for each in observed_differences(a, b)]
