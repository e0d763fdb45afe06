"""Fields that make two runs incomparable."""

import pytest

from lib.report.compare import compare_runs
from lib.report.options import BITS_PER_BYTE
from lib.report.run_facts import field_differences, observed_differences
from lib.runs.identity import flatten_identity
from lib.runs.record import RunRecord
from tests.lib.fabricated import DOCUMENTS, IDENTITY, MANIFEST, changed, write_run


@pytest.fixture
def fields(tmp_path):
    """Return a function that lists the fields in which a changed copy differs from the run."""

    def find(identity=IDENTITY, manifest=MANIFEST, of=field_differences, first=MANIFEST, **rest):
        a = RunRecord(write_run(tmp_path / "a", manifest=first))
        b = RunRecord(write_run(tmp_path / "b", identity=identity, manifest=manifest, **rest))
        return [difference.field for difference in of(a, b)]

    return find


SETTINGS = [
    ("machine__compile", True, "machine.compile"),
    ("machine__precision", "bf16", "machine.precision"),
    ("model__attention__backend", "math", "model.attention.backend"),
    ("repro__profile", "maxout_speed", "repro.profile"),
    ("train__batch_size", 4, "train.batch_size"),
    ("optimizer__beta2", 0.99, "optimizer.beta2"),
    ("seed", 2, "seed"),
]
FACTS = [
    ("data__digest", "d2", "data"),
    ("data__split", {"id": "s2"}, "split"),
    ("data__tokenizer__digest", "t2", "tokenizer"),
    ("origin__torch", "2.12.0", "torch"),
    ("origin__device", "another", "device"),
    ("torch__build_digest", "b2", "torch_build"),
    ("torch__reduced_precision_reduction", {"bf16": False}, "reduced_precision"),
    ("variables__NVIDIA_TF32_OVERRIDE", "1", "variables.NVIDIA_TF32_OVERRIDE"),
    ("environment__cudnn_version", 91002, "cudnn"),
    ("hardware__cpu_capability", "AVX512", "cpu_capability"),
    ("attention__kernel", "sdpa flash", "attention"),
    ("batch__micro_batch", 4, "batch"),
    ("processes__world_size", 2, "world_size"),
    ("knobs__allow_tf32_cudnn__observed", True, "knobs.allow_tf32_cudnn"),
    ("knobs__torch_compile_enabled__observed", True, "knobs.torch_compile_enabled"),
    ("oom_fallbacks", [{"action": "halve"}], "oom_fallbacks"),
    ("earlier_divisions", [{"iterations": 5, "gpus": 2}], "earlier_divisions"),
    ("code__changed_during_run", ["gpt2/train.py"], "changed_during_run"),
    ("origin__sources", {"gpt2/train.py": "b" * 64}, "code"),
]


def test_a_setting_or_a_fact_is_one_field_and_an_absent_fact_is_unknown(tmp_path):
    """Two runs that differ in it are refused, or compared as labelled."""
    a = RunRecord(write_run(tmp_path / "a"))

    def changed_run(**other):
        return RunRecord(write_run(tmp_path / "b", **other))

    b = changed_run()
    assert field_differences(a, b) == [] and compare_runs(a, b, {})["verdict"] == "BITWISE"
    cases = [({"identity": changed(IDENTITY, **{path: v})}, field) for path, v, field in SETTINGS]
    cases += [({"manifest": changed(MANIFEST, **{path: v})}, field) for path, v, field in FACTS]
    whole = [path for path, _, _ in FACTS if not path.startswith(("knobs", "earlier"))]
    unknown = {path: field for path, _, field in FACTS if path in whole}
    cases += [({"manifest": changed(MANIFEST, **{path: ...})}, unknown[path]) for path in whole]
    for other, field in cases:
        b = changed_run(**other)
        assert [difference.field for difference in field_differences(a, b)] == [field], other
        refused, labelled = compare_runs(a, b, {}), compare_runs(a, b, {}, [], [field])
        assert (refused["verdict"], refused["losses"]) == ("NOT COMPARABLE", None)
        assert [reason.split(":")[0] for reason in refused["reasons"]] == [field]
        assert labelled["verdict"] == "COMPARED" and labelled["labels"][0].startswith(f"{field}: ")


def test_unrecorded_facts_do_not_compare_equal(fields):
    both = changed(MANIFEST, origin__torch=..., oom_fallbacks=...)
    assert fields(manifest=both, first=both) == ["oom_fallbacks", "torch"]
    # A manifest without any knob has nothing that could be compared by name.
    assert "knobs.cpu_threads" in fields(manifest=changed(MANIFEST, knobs=...))


def test_how_much_memory_there_was_is_no_field(fields):
    a, b = (
        changed(MANIFEST, oom_fallbacks=[{"action": "halve", "peak_bytes": peak}])
        for peak in (100, 200)
    )
    assert fields(manifest=a, first=b) == []


def test_other_documents_are_a_field(fields):
    assert fields(documents={"x": (31.4, 5, 10)}) == ["documents"]
    assert fields(documents={"x": (30.0, 5, 10), "y": (29.0, 5, 10)}) == []


def test_a_consequence_of_a_setting_is_not_reported_twice(fields):
    identity = changed(IDENTITY, model__attention__terms=[{"name": "reciprocal", "alpha": 0.5}])
    manifest = changed(MANIFEST, attention__kernel="by rows")
    assert fields(identity, manifest) == ["model.attention.terms.reciprocal"]
    knob = {"requested": "bf16", "resolved": "bf16", "observed": "bf16"}
    manifest = changed(MANIFEST, knobs__precision_mode=knob)
    assert fields(changed(IDENTITY, machine__precision="bf16"), manifest) == ["machine.precision"]
    assert (
        fields(changed(IDENTITY, machine__precision="bf16"), manifest, observed_differences) == []
    )
    # An observed value that differs from the request is reported.
    knob = {"requested": "bf16", "resolved": "bf16", "observed": "fp32"}
    manifest = changed(MANIFEST, knobs__precision_mode=knob, attention__kernel="by rows")
    assert fields(changed(IDENTITY, seed=2), manifest, observed_differences) == ["attention"]


def test_the_kernel_of_a_mechanism_is_no_surprise_and_that_of_a_neighbour_is(fields):
    kernel = {"requested": "auto", "resolved": "rows", "observed": "rows"}
    plain = {**kernel, "resolved": "sdpa", "observed": "sdpa"}
    identity = changed(IDENTITY, model__attention__terms=[{"name": "reciprocal"}])
    seen = [
        fields(one, changed(MANIFEST, knobs__attention_impl=kernel))
        for one in (identity, changed(IDENTITY, optimizer__beta2=0.9))
    ]
    # The first run's manifest has no such knob: unknown, whatever the mechanism.
    assert [found[-1] for found in seen] == ["knobs.attention_impl"] * 2
    known = changed(MANIFEST, knobs__attention_impl=plain)
    assert fields(identity, known, first=changed(MANIFEST, knobs__attention_impl=kernel)) == [
        "model.attention.terms.reciprocal"
    ]
    other = changed(IDENTITY, optimizer__beta2=0.9)
    assert fields(other, known, first=changed(MANIFEST, knobs__attention_impl=kernel)) == [
        "optimizer.beta2",
        "knobs.attention_impl",
    ]


def test_which_gpu_it_was_is_no_field_and_which_workspace_is(fields):
    def knob(value):
        return {"requested": "cuda", "resolved": value, "observed": value}

    def facts(device, workspace):
        return changed(
            MANIFEST, knobs__device=knob(device), knobs__cublas_workspace_config=knob(workspace)
        )

    first = facts("cuda:0", ":4096:8")
    assert fields(manifest=facts("cuda:1", ":4096:8"), first=first) == []
    assert fields(manifest=facts("cuda:0", ":16:8"), first=first) == [
        "knobs.cublas_workspace_config"
    ]


def test_code_is_compared_where_both_have_it(fields):
    both = {"gpt2/train.py": "a" * 64}
    assert fields(manifest=changed(MANIFEST, origin__sources=both | {"gpt2/ra.py": "c"})) == []
    assert fields(manifest=changed(MANIFEST, origin__sources={"gpt2/ra.py": "c"})) == ["code"]


def test_code_that_was_edited_after_it_was_loaded_equals_nothing(tmp_path):
    edited = changed(MANIFEST, origin__sources={"gpt2/train.py": "edited after it was loaded"})
    a, b = (RunRecord(write_run(tmp_path / name, manifest=edited)) for name in "ab")
    (found,) = field_differences(a, b)
    assert found.field == "code" and "gpt2/train.py" in found.a


def test_what_changes_the_speed_only_is_no_difference(fields):
    manifest = changed(MANIFEST, hardware__driver_version="550", hardware__gpu_name="H100")
    assert fields(manifest=manifest) == []


def test_flat_paths():
    flat = flatten_identity(
        {"a": {"name": "n", "b": [1, 2]}, "c": [{"name": "p", "d": 3}], "e": []}
    )
    assert flat == {"a": "n", "a.b": [1, 2], "c.p": "p", "c.p.d": 3}


# Other texts and tokenizers.


@pytest.mark.parametrize("documents", [DOCUMENTS, {**DOCUMENTS, "z": (20.0, 5, 10)}])
def test_another_training_text_is_comparable_on_the_same_documents(tmp_path, documents):
    """What was read and how it was split follow from the declared path; the documents do not."""
    facts = {"data__digest": "d2", "data__split": {"id": "s2"}}
    runs = [
        write_run(tmp_path / path, identity=identity, manifest=manifest, documents=evaluated)
        for path, identity, manifest, evaluated in (
            ("a", changed(IDENTITY, data={"custom_path": "a"}), MANIFEST, DOCUMENTS),
            (
                "b",
                changed(IDENTITY, data={"custom_path": "b"}),
                changed(MANIFEST, **facts),
                documents,
            ),
        )
    ]
    left, right = map(RunRecord, runs)
    differing = [each.field for each in observed_differences(left, right)]
    assert differing == ([] if documents is DOCUMENTS else ["documents"])
    compared = compare_runs(left, right, {}, ["data.custom_path", "documents"])
    assert (compared["losses"] is not None) == (documents is DOCUMENTS)


def test_another_training_text_of_one_path_is_refused(tmp_path):
    a = write_run(tmp_path / "a", manifest=MANIFEST)
    b = write_run(tmp_path / "b", manifest=changed(MANIFEST, data__digest="d2"))
    fields = [each.field for each in observed_differences(*map(RunRecord, (a, b)))]
    assert fields == ["data"]


@pytest.mark.parametrize("size", [10, 11])
def test_two_tokenizers_are_comparable_in_bits_per_byte_of_the_same_bytes(tmp_path, size):
    facts = {"data__digest": "d2", "data__tokenizer": {"digest": "t2"}}
    a, b = (
        RunRecord(write_run(tmp_path / name, **given))
        for name, given in (
            (
                "a",
                {"identity": changed(IDENTITY, data={"tokenizer": "byte"}), "manifest": MANIFEST},
            ),
            (
                "b",
                {
                    "identity": changed(IDENTITY, data={"tokenizer": "gpt2"}),
                    "manifest": changed(MANIFEST, **facts),
                    # Four bytes each.
                    "documents": {**DOCUMENTS, "y": (29.0, 6, size)},
                },
            ),
        )
    )
    differing = [each.field for each in observed_differences(a, b, BITS_PER_BYTE)]
    assert differing == ([] if size == DOCUMENTS["y"][2] else ["text"])
    assert "tokenizer" in [each.field for each in observed_differences(a, b)]
