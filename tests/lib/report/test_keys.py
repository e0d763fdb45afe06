"""Fields that make two runs incomparable."""

import json

import pytest

from lib.files import write_json
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
    a, run = RunRecord(write_run(tmp_path / "a")), write_run(tmp_path / "b")
    cases = [(changed(IDENTITY, **{path: v}), MANIFEST, field) for path, v, field in SETTINGS]
    cases += [(IDENTITY, changed(MANIFEST, **{path: v}), field) for path, v, field in FACTS]
    for path, _, field in FACTS:
        if not path.startswith(("knobs", "earlier")):
            cases.append((IDENTITY, changed(MANIFEST, **{path: ...}), field))
    for identity, manifest, field in [(IDENTITY, MANIFEST, None), *cases]:
        run.resolved_config.write_text(json.dumps({"identity": identity}))
        run.manifest.write_text(json.dumps(manifest))
        found = [difference.field for difference in field_differences(a, RunRecord(run))]
        assert found == [field] * (field is not None)


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
UNRECORDED = {"origin__torch": ..., "oom_fallbacks": ...}
EDITED = {"origin__sources": {"gpt2/train.py": "edited after it was loaded"}}
MORE_CODE = {"origin__sources": {"gpt2/train.py": "a" * 64, "gpt2/ra.py": "c" * 64}}
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
        (
            *({}, {"machine__precision": "bf16"}),
            *({"knobs__precision_mode": knob("bf16")}, ["machine.precision"]),
        ),
        # The kernel of a mechanism is no surprise, and that of a neighbour is.
        (kernel("rows"), RECIPROCAL, kernel("sdpa"), [TERM]),
        (
            *(kernel("rows"), {"optimizer__beta2": 0.9}),
            *(kernel("sdpa"), ["optimizer.beta2", "knobs.attention_impl"]),
        ),
        # A knob that one manifest lacks is unknown, whatever the mechanism.
        ({}, RECIPROCAL, kernel("rows"), [TERM, "knobs.attention_impl"]),
        # Which of equal GPUs it was does not matter.
        (gpu("cuda:0", "a"), {}, gpu("cuda:1", "a"), []),
        (gpu("cuda:0", "a"), {}, gpu("cuda:0", "b"), ["knobs.cublas_workspace_config"]),
        # Code is compared if both have loaded it; if it was edited since, it equals nothing.
        ({}, {}, MORE_CODE, []),
        ({}, {}, {"origin__sources": {"gpt2/ra.py": "c" * 64}}, ["code"]),
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


def test_a_default_that_the_identity_lacks_is_the_value_of_the_symbol(tmp_path):
    runs = [write_run(tmp_path / name) for name in "ab"]
    symbols = {"LORA_BASE": "fp32"}, {"LORA_BASE": "int8"}
    identities = IDENTITY, changed(IDENTITY, model__base="int8")
    for run, values, identity in zip(runs, symbols, identities, strict=True):
        write_json(run.resolved_config, {"hash8": "", "symbols": values, "identity": identity})
    names = {"model.base": "LORA_BASE"}
    (difference,) = field_differences(*map(RunRecord, runs), names)
    assert str(difference) == "LORA_BASE: fp32, int8"


def test_an_observed_value_that_is_not_the_requested_one_is_reported(tmp_path):
    changes = {"knobs__precision_mode": knob("bf16", "fp32"), "attention__kernel": "by rows"}
    other = {"identity": changed(IDENTITY, seed=2), "manifest": changed(MANIFEST, **changes)}
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **other)
    differing = observed_differences(RunRecord(a), RunRecord(b))
    assert [difference.field for difference in differing] == ["attention"]


# Other texts and tokenizers: what was read and how it was split follow from the declared path.

OTHER_TEXT = {"data__digest": "d2", "data__split": {"id": "s2"}}
OTHER_TOKENIZER = {"data__digest": "d2", "data__tokenizer": {"digest": "t2"}}
BYTES, GPT2 = {"tokenizer": "byte"}, {"tokenizer": "gpt2"}
A, B = {"custom_path": "a"}, {"custom_path": "b"}
# Its tokens have four bytes each.
LONGER = {**DOCUMENTS, "y": (29.0, 6, 11)}


@pytest.mark.parametrize(
    ("data", "other", "observed", "documents", "unit", "expected"),
    [
        (A, B, OTHER_TEXT, DOCUMENTS, NATS, []),
        (A, B, OTHER_TEXT, {**DOCUMENTS, "z": (20.0, 5, 10)}, NATS, ["documents"]),
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
