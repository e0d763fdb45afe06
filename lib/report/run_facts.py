"""All facts of a run directory that can change its loss, as one flat table, and their differences.

Fields are settings ("optimizer.beta1"), observed facts ("torch", "knobs.precision_mode") and digests of
the code. A field missing from a manifest is UNKNOWN, which is unequal to everything. A fact that follows
from a setting that differs is not reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.files import json_digest
from lib.json_files import DamagedRecord
from lib.report.options import BITS_PER_BYTE, NATS
from lib.runs.code import makes_results
from lib.runs.identity import flatten_identity
from lib.runs.record import UNKNOWN, RunRecord, derived

# Value of a setting of a component that the run does not have.
MISSING_SETTING = "-"

_VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE"),
)
# Field → path in the manifest.
_OBSERVED: Mapping[str, Sequence[str]] = {
    "data": ("data", "digest"),
    "tokenizer": ("data", "tokenizer", "digest"),
    "split": ("data", "split"),
    "torch": ("origin", "torch"),
    # Compiler, BLAS and oneDNN of the torch build.
    "torch_build": ("torch", "build_digest"),
    "reduced_precision": ("torch", "reduced_precision_reduction"),
    "device": ("origin", "device"),
    "cpu_capability": ("hardware", "cpu_capability"),
    "cuda": ("hardware", "cuda_version"),
    "hip": ("hardware", "hip_version"),
    "cudnn": ("environment", "cudnn_version"),
    "attention": ("attention", "kernel"),
    "batch": ("batch",),
    "world_size": ("processes", "world_size"),
    "backend": ("processes", "backend"),
    "changed_during_run": ("code", "changed_during_run"),
    **{f"variables.{name}": ("variables", name) for name in _VARIABLES},
}
# Knobs that affect only the speed, and those that quantization_scheme determines: runs in full precision
# do not have them.
_NO_FACTS = (
    *("expandable_segments", "num_workers", "pin_memory", "prefetch_factor"),
    *("persistent_workers", "compile_warmup_steps", "bnb_compute_dtype", "bnb_double_quant"),
)


@derived
def observed_facts(record: RunRecord) -> Mapping[str, Any]:
    """Return the facts of a run beside its settings and its code. Raises RecordError."""
    manifest = record.manifest
    facts = {name: manifest.find(*path) for name, path in _OBSERVED.items()}
    documents = [[item.item_id, item.tokens_sha256, item.n_tokens] for item in record.documents]
    facts["documents"] = json_digest(documents)
    fallbacks = manifest.find("oom_fallbacks")
    if isinstance(fallbacks, list):
        fallbacks = [{k: v for k, v in step.items() if k != "peak_bytes"} for step in fallbacks]
    facts["oom_fallbacks"] = fallbacks
    facts["earlier_divisions"] = manifest.find("earlier_divisions", default=[])
    knobs = manifest.find("knobs")
    for name, knob in knobs.items() if isinstance(knobs, Mapping) else ():
        if not isinstance(knob, Mapping) or not knob.keys() >= {"requested", "observed"}:
            expected = f"knobs.{name} with its requested and observed value"
            raise DamagedRecord(manifest.file, expected, repr(knob)[:60])
        if name not in _NO_FACTS:
            facts[f"knobs.{name}"] = knob["observed"]
    if "knobs.device" in facts:
        # The index among identical devices does not matter.
        facts["knobs.device"] = str(facts["knobs.device"]).partition(":")[0]
    return facts


@derived
def text_digest(record: RunRecord) -> str:
    """Return the digest of the evaluated documents and of the number of predicted bytes of each."""
    return json_digest([[d.doc_sha256 or d.tokens_sha256, d.n_bytes] for d in record.documents])


@derived
def settings_of(record: RunRecord) -> Mapping[str, Any]:
    """Return path → value of the identity; a component's name is the value at its path."""
    return flatten_identity(record.identity)


def field_value(record: RunRecord, field: str) -> Any:
    """Return an observed fact, ``code``, a setting or a symbol. Raises KeyError if there is none."""
    if field == "code":
        return code_digest(record.sources, record.sources)
    for table in (observed_facts(record), settings_of(record), record.symbols):
        if field in table:
            return table[field]
    raise KeyError(field)


def code_digest(sources: Mapping[str, str], names: Sequence[str] | Mapping[str, str]) -> str:
    """Return the first twelve hex digits of the digest over the files ``names`` of ``sources``."""
    return json_digest({name: sources[name] for name in sorted(names)})[:12]


_MAX_FILES_SHOWN = 3
_MAX_VALUE_CHARS = 60
_KERNEL = ("model", "machine", "train.batch_size")
# Observed fact → settings that determine it; a path includes all paths below it.
_FOLLOWS = {
    # The documents that are evaluated must be the same in any case.
    "data": ("data",),
    "split": ("data",),
    "attention": _KERNEL,
    "batch": ("train", "model.shape.block_size"),
    "world_size": ("train.gpus",),
    "backend": ("train.gpus", "machine.device"),
    "device": ("machine.device",),
    "cudnn": ("machine.device",),
    "knobs.world_size": ("train.gpus",),
    "knobs.attention_impl": _KERNEL,
    "knobs.sdpa_backends_allowed": _KERNEL,
    "knobs.sdpa_backend_selected": _KERNEL,
    "knobs.flash_attention_enabled": _KERNEL,
    "knobs.nsa_backend": _KERNEL,
    "knobs.loss_backend": _KERNEL,
    "knobs.data_parallel": ("train.gpus", "machine.data_parallel"),
    "knobs.ddp_bucket_cap_mib": ("train.gpus", "machine.data_parallel"),
    "knobs.ddp_gradients_copied": ("train.gpus", "machine.data_parallel"),
    "variables.CUBLAS_WORKSPACE_CONFIG": ("machine",),
}
# Setting → setting that determines it: with the same global batch, more GPUs accumulate less.
_SETTING_FOLLOWS = {"train.grad_accumulation": "train.gpus"}


@dataclass(frozen=True)
class FieldDifference:
    """One field and its values in both runs."""

    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.a)}, {_shown(self.b)}"


def field_differences(
    a: RunRecord, b: RunRecord, names: Mapping[str, str] | None = None
) -> list[FieldDifference]:
    """Return every field that can change a loss and is not known to be equal, settings first."""
    settings = []
    for path in differing_settings(settings_of(a), settings_of(b)):
        symbol = (names or {}).get(path)
        values = (_setting(record, path, symbol) for record in (a, b))
        settings.append(FieldDifference(symbol or path, *values))
    return [*settings, *_observed(a, b), *_code_differences(a.sources, b.sources)]


def _setting(record: RunRecord, path: str, symbol: str | None) -> Any:
    """Return the setting at ``path``; the identity may lack a default, which the symbol has."""
    default = record.symbols.get(symbol) if symbol else None
    return settings_of(record).get(path, default or MISSING_SETTING)


def observed_differences(a: RunRecord, b: RunRecord, unit: str = NATS) -> list[FieldDifference]:
    """Return differing observed facts and code; bits per byte are comparable on the same bytes."""
    observed = _observed(a, b)
    if unit == BITS_PER_BYTE:
        observed = [each for each in observed if each.field not in ("documents", "tokenizer")]
        observed += _unequal({"text": text_digest(a)}, {"text": text_digest(b)})
    return [*observed, *_code_differences(a.sources, b.sources)]


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[FieldDifference]:
    """Return the facts that are not known to be equal."""
    values = [(name, a.get(name, UNKNOWN), b.get(name, UNKNOWN)) for name in sorted({*a, *b})]
    return [FieldDifference(*each) for each in values if UNKNOWN in each or each[1] != each[2]]


def _code_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[FieldDifference]:
    """Return a difference of files that both runs loaded; others follow from the settings."""
    if a and a == b and _is_digest("".join(a.values())):
        return []
    shared = sorted(filter(makes_results, a.keys() & b.keys()))
    if not shared:
        return [FieldDifference("code", UNKNOWN, UNKNOWN)]
    # A file edited after loading has a fixed text in place of a digest, equal in both runs.
    changed = [name for name in shared if not _is_digest(a[name]) or a[name] != b[name]]
    if not changed:
        return []
    shown = " ".join(changed[:_MAX_FILES_SHOWN]) + " …" * (len(changed) > _MAX_FILES_SHOWN)
    return [FieldDifference("code", f"{code_digest(a, shared)} ({shown})", code_digest(b, shared))]


def differing_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the differing paths, without those that follow from another difference."""
    off = MISSING_SETTING
    paths = [path for path in sorted({*a, *b}) if a.get(path, off) != b.get(path, off)]
    paths = [path for path in paths if _SETTING_FOLLOWS.get(path) not in paths]
    below = tuple(f"{path}." for path in paths)
    return [path for path in paths if (path in a and path in b) or not path.startswith(below)]


def _observed(a: RunRecord, b: RunRecord) -> list[FieldDifference]:
    """Return the observed differences that do not follow from a setting or a request."""
    differing = _unequal(observed_facts(a), observed_facts(b))
    if not differing:
        return []
    settings = differing_settings(settings_of(a), settings_of(b))
    return [d for d in differing if UNKNOWN in (d.a, d.b) or not _follows(d.field, a, b, settings)]


def _follows(name: str, a: RunRecord, b: RunRecord, settings: Sequence[str]) -> bool:
    requested = [r.manifest.find(*name.split("."), "requested") for r in (a, b)]
    # Every knob depends on the device.
    causes = _FOLLOWS.get(name, ("machine.device",) if name.startswith("knobs.") else ())
    return requested[0] != requested[1] or any(
        s == cause or s.startswith(f"{cause}.") for s in settings for cause in causes
    )


def _is_digest(text: str) -> bool:
    return " " not in text


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"
