"""Fields that make two runs incomparable."""

import pytest

from lib.report.compare import compare_runs
from lib.report.options import BITS_PER_BYTE, NATS
from lib.report.run_facts import field_differences, observed_differences
from lib.runs.record import RunRecord
from tests.lib.fabricated import DOCUMENTS, IDENTITY, MANIFEST, changed, write_run

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


def knob(requested, observed=None):
    return {"requested": requested, "resolved": requested, "observed": observed or requested}


def kernel(name):
    return {"knobs__attention_impl": {"requested": "auto", "observed": name}}


def gpu(device, workspace):
    workspaces = {"requested": None, "observed": workspace}
    devices = {"requested": "cuda", "observed": device}
    return {"knobs__device": devices, "knobs__cublas_workspace_config": workspaces}


def memory(peak):
    return {"oom_fallbacks": [{"action": "halve", "peak_bytes": peak}]}


TERM = "model.attention.terms.reciprocal"
RECIPROCAL = {"model__attention__terms": [{"name": "reciprocal", "alpha": 0.5}]}
BETA2, BF16 = {"optimizer__beta2": 0.9}, {"machine__precision": "bf16"}
UNRECORDED = {"origin__torch": ..., "oom_fallbacks": ...}
EDITED = {"origin__sources": {"gpt2/train.py": "edited after it was loaded"}}
MORE_CODE = {"origin__sources": {"gpt2/train.py": "a" * 64, "gpt2/ra.py": "c" * 64}}
OTHER_CODE = {"origin__sources": {"gpt2/ra.py": "c" * 64}}
FASTER = {"hardware__driver_version": "550", "hardware__gpu_name": "H100"}


@pytest.mark.parametrize(
    ("first", "settings", "second", "expected"),
    [
        (UNRECORDED, {}, UNRECORDED, ["oom_fallbacks", "torch"]),
        ({}, {}, {"knobs": ...}, [f"knobs.{name}" for name in sorted(MANIFEST["knobs"])]),
        (memory(200), {}, memory(100), []),
        ({}, {}, FASTER, []),
        # A consequence of a setting is not reported twice.
        ({}, RECIPROCAL, {"attention__kernel": "by rows"}, [TERM]),
        ({}, BF16, {"knobs__precision_mode": knob("bf16")}, ["machine.precision"]),
        # The kernel of a mechanism is no surprise, and that of a neighbour is.
        (kernel("rows"), RECIPROCAL, kernel("sdpa"), [TERM]),
        (kernel("rows"), BETA2, kernel("sdpa"), ["optimizer.beta2", "knobs.attention_impl"]),
        # A knob that one manifest lacks is unknown, whatever the mechanism.
        ({}, RECIPROCAL, kernel("rows"), [TERM, "knobs.attention_impl"]),
        # Which of equal GPUs it was does not matter.
        (gpu("cuda:0", "a"), {}, gpu("cuda:1", "a"), []),
        (gpu("cuda:0", "a"), {}, gpu("cuda:0", "b"), ["knobs.cublas_workspace_config"]),
        # Code is compared if both have loaded it; if it was edited since, it equals nothing.
        ({}, {}, MORE_CODE, []),
        ({}, {}, OTHER_CODE, ["code"]),
        (EDITED, {}, EDITED, ["code"]),
    ],
)
def test_a_field_differs_if_it_can_change_a_loss_and_follows_from_no_other(
    tmp_path, first, settings, second, expected
):
    a = RunRecord(write_run(tmp_path / "a", manifest=changed(MANIFEST, **first)))
    other = {"manifest": changed(MANIFEST, **second), "identity": changed(IDENTITY, **settings)}
    b = RunRecord(write_run(tmp_path / "b", **other))
    assert [difference.field for difference in field_differences(a, b)] == expected


def test_an_observed_value_that_is_not_the_requested_one_is_reported(tmp_path):
    a = RunRecord(write_run(tmp_path / "a"))
    precision = {"knobs__precision_mode": knob("bf16", "fp32")}
    manifest = changed(MANIFEST, **precision, attention__kernel="by rows")
    b = RunRecord(write_run(tmp_path / "b", identity=changed(IDENTITY, seed=2), manifest=manifest))
    assert [difference.field for difference in observed_differences(a, b)] == ["attention"]


# Other texts and tokenizers: what was read and how it was split follow from the declared path.

OTHER_TEXT = {"data__digest": "d2", "data__split": {"id": "s2"}}
OTHER_TOKENIZER = {"data__digest": "d2", "data__tokenizer": {"digest": "t2"}}
THREE = {**DOCUMENTS, "z": (20.0, 5, 10)}
# Four bytes each.
LONGER = {**DOCUMENTS, "y": (29.0, 6, 11)}


BYTES, GPT2 = {"tokenizer": "byte"}, {"tokenizer": "gpt2"}
A, B = {"custom_path": "a"}, {"custom_path": "b"}


@pytest.mark.parametrize(
    ("data", "other", "observed", "documents", "unit", "expected"),
    [
        (A, B, OTHER_TEXT, DOCUMENTS, NATS, []),
        (A, B, OTHER_TEXT, THREE, NATS, ["documents"]),
        (A, A, {"data__digest": "d2"}, DOCUMENTS, NATS, ["data"]),
        (BYTES, GPT2, OTHER_TOKENIZER, DOCUMENTS, NATS, ["tokenizer"]),
        (BYTES, GPT2, OTHER_TOKENIZER, DOCUMENTS, BITS_PER_BYTE, []),
        (BYTES, GPT2, OTHER_TOKENIZER, LONGER, BITS_PER_BYTE, ["text"]),
        # The losses of the documents are no field.
        (A, A, {}, {"x": (30.0, 5, 10), "y": (29.0, 5, 10)}, NATS, []),
    ],
)
def test_other_data_is_comparable_on_the_same_documents_or_bytes(
    tmp_path, data, other, observed, documents, unit, expected
):
    a = write_run(tmp_path / "a", identity=changed(IDENTITY, data=data))
    changes = {"manifest": changed(MANIFEST, **observed), "documents": documents}
    b = write_run(tmp_path / "b", identity=changed(IDENTITY, data=other), **changes)
    differing = observed_differences(*map(RunRecord, (a, b)), unit)
    assert [each.field for each in differing] == expected
