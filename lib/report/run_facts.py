"""All facts of a run directory that can change its loss, as one flat table, and their differences.

The table has three kinds of fields: settings ("optimizer.beta1"), observed facts ("torch",
"knobs.precision_mode") and the digests of the code. A field missing from a manifest is UNKNOWN,
and UNKNOWN compares unequal to everything, including itself.

An observed fact that follows from a setting (such as the attention kernel from the mechanism) is
not reported if that setting differs: the setting is reported instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.files import json_digest
from lib.json_files import DamagedRecord
from lib.report.options import BITS_PER_BYTE, NATS
from lib.runs.code import makes_results
from lib.runs.identity import flatten_identity
from lib.runs.record import UNKNOWN, JsonRecord, RunRecord, derived
from lib.runs.run_dir import RunDir

# Value of a setting of a component that the run does not have.
MISSING_SETTING = "-"

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
    **{
        f"variables.{name}": ("variables", name)
        for name in (
            "CUBLAS_WORKSPACE_CONFIG",
            "MKL_CBWR",
            "NCCL_ALGO",
            "NCCL_PROTO",
            "NVIDIA_TF32_OVERRIDE",
        )
    },
}
# Further facts that affect only the speed.
_SPEED: Mapping[str, Sequence[str]] = {
    "gpu": ("hardware", "gpu_name"),
    "driver": ("hardware", "driver_version"),
    "debug_flags": ("debug_flags",),
}
# Knobs that affect only the speed.
_SPEED_KNOBS = (
    *("expandable_segments", "num_workers", "pin_memory", "prefetch_factor"),
    *("persistent_workers", "compile_warmup_steps"),
)


@dataclass(frozen=True)
class RunFacts:
    """Settings, observed facts and code digests of one run, from its record."""

    record: RunRecord
    # Path → value of the identity; the name of a component is the value at the component's path.
    settings: Mapping[str, Any]
    observed: Mapping[str, Any]
    # Knob → requested value; explains an observed value that differs for that reason.
    requested: Mapping[str, Any]
    # File → SHA-256 of all loaded code that can change the result.
    sources: Mapping[str, str]
    # Further facts that affect only the speed.
    speed: Mapping[str, Any]
    # Digest of the evaluated documents and of the number of predicted bytes of each.
    text: str = ""

    @property
    def run(self) -> RunDir:
        return self.record.run

    @property
    def symbols(self) -> Mapping[str, Any]:
        return self.record.symbols

    def value(self, field: str) -> Any:
        """Return the value of ``field``: an observed fact, ``code``, a setting or a symbol.

        Raises KeyError if there is no such field.
        """
        if field == "code":
            return code_digest(self.sources, self.sources)
        for table in (self.observed, self.settings, self.symbols):
            if field in table:
                return table[field]
        raise KeyError(field)


def read_run_facts(run: RunDir) -> RunFacts:
    """Return the facts of a run. Raises ConfigError if a record is missing or unreadable."""
    return recorded_facts(RunRecord(run))


@derived
def recorded_facts(record: RunRecord) -> RunFacts:
    manifest, documents = record.manifest, record.documents
    observed = {name: manifest.find(*path) for name, path in _OBSERVED.items()}
    observed["documents"] = json_digest(
        [[item.item_id, item.tokens_sha256, item.n_tokens] for item in documents]
    )
    observed["oom_fallbacks"] = _fallbacks(manifest)
    observed["earlier_divisions"] = manifest.find("earlier_divisions", default=[])
    knobs = manifest.find("knobs")
    by_name: Mapping[str, Any] = knobs if isinstance(knobs, Mapping) else {}
    for name, knob in by_name.items():
        if not isinstance(knob, Mapping) or not knob.keys() >= {"requested", "observed"}:
            expected = f"knobs.{name} with its requested and observed value"
            raise DamagedRecord(manifest.file, expected, repr(knob)[:60])
    speed = {name: manifest.find(*path) for name, path in _SPEED.items()}
    for name, knob in by_name.items():
        table = speed if name in _SPEED_KNOBS else observed
        observed_value = knob["observed"]
        # The index among identical devices does not matter.
        table[f"knobs.{name}"] = (
            str(observed_value).partition(":")[0] if name == "device" else observed_value
        )
    return RunFacts(
        record=record,
        settings=flatten_identity(record.identity),
        observed=observed,
        requested={f"knobs.{name}": knob["requested"] for name, knob in by_name.items()},
        sources=record.sources,
        speed=speed,
        text=json_digest([[d.doc_sha256 or d.tokens_sha256, d.n_bytes] for d in documents]),
    )


def code_digest(sources: Mapping[str, str], names: Sequence[str] | Mapping[str, str]) -> str:
    """Return the first twelve hex digits of the digest over the files ``names`` of ``sources``."""
    return json_digest({name: sources[name] for name in sorted(names)})[:12]


def _fallbacks(manifest: JsonRecord) -> Any:
    steps = manifest.find("oom_fallbacks")
    if not isinstance(steps, list):
        return UNKNOWN
    return [{k: v for k, v in step.items() if k != "peak_bytes"} for step in steps]


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
    a: RunFacts, b: RunFacts, names: Mapping[str, str] | None = None
) -> list[FieldDifference]:
    """Return every field that can change a loss and is not known to be equal, settings first.

    ``names`` maps setting paths to the names to report, such as symbols.
    """
    paths = _differing_settings(a, b)
    settings = [
        FieldDifference(
            (names or {}).get(p, p),
            a.settings.get(p, MISSING_SETTING),
            b.settings.get(p, MISSING_SETTING),
        )
        for p in paths
    ]
    return [*settings, *_observed(a, b, paths), *code_differences(a, b)]


def observed_differences(a: RunFacts, b: RunFacts, unit: str = NATS) -> list[FieldDifference]:
    """Return differing observed facts and code of runs whose settings differ on purpose.

    Losses in bits per byte are comparable on the same bytes, whatever the tokens.
    """
    observed = list(_observed(a, b, _differing_settings(a, b)))
    if unit == BITS_PER_BYTE:
        observed = [each for each in observed if each.field not in ("documents", "tokenizer")]
        observed += [FieldDifference("text", a.text, b.text)] if a.text != b.text else []
    return [*observed, *code_differences(a, b)]


def speed_differences(a: RunFacts, b: RunFacts) -> list[FieldDifference]:
    """Return further differences that make the speeds of two runs incomparable."""
    return [
        FieldDifference(name, a.speed.get(name, UNKNOWN), b.speed.get(name, UNKNOWN))
        for name in sorted({*a.speed, *b.speed})
        if not _same(a.speed.get(name, UNKNOWN), b.speed.get(name, UNKNOWN))
    ]


def code_differences(a: RunFacts, b: RunFacts) -> Iterator[FieldDifference]:
    """Yield a difference if the code that makes results is not the same in files that both runs loaded.

    A file loaded by only one run follows from the settings: a file that both runs share imports it.
    """
    if a.sources and a.sources == b.sources and _is_digest("".join(a.sources.values())):
        return
    shared = sorted(filter(makes_results, a.sources.keys() & b.sources.keys()))
    if not shared:
        yield FieldDifference("code", UNKNOWN, UNKNOWN)
        return
    # A file edited after loading has a fixed text in place of a digest, equal in both runs.
    changed = [
        name
        for name in shared
        if not _is_digest(a.sources[name]) or a.sources[name] != b.sources[name]
    ]
    if changed:
        shown = " ".join(changed[:_MAX_FILES_SHOWN]) + (" …" if changed[_MAX_FILES_SHOWN:] else "")
        yield FieldDifference(
            "code",
            f"{code_digest(a.sources, shared)} ({shown})",
            code_digest(b.sources, shared),
        )


def _differing_settings(a: RunFacts, b: RunFacts) -> list[str]:
    """Return the differing paths, without those that follow from another difference.

    Paths below a component that only one run has follow from the component.
    """
    paths = [
        path
        for path in sorted({*a.settings, *b.settings})
        if a.settings.get(path, MISSING_SETTING) != b.settings.get(path, MISSING_SETTING)
    ]
    paths = [path for path in paths if _SETTING_FOLLOWS.get(path) not in paths]
    one_sided = {path for path in paths if path not in a.settings or path not in b.settings}
    below = tuple(f"{path}." for path in paths)
    return [path for path in paths if path not in one_sided or not path.startswith(below)]


def _observed(a: RunFacts, b: RunFacts, settings: Sequence[str]) -> Iterator[FieldDifference]:
    for name in sorted({*a.observed, *b.observed}):
        left, right = (facts.observed.get(name, UNKNOWN) for facts in (a, b))
        if _same(left, right):
            continue
        if UNKNOWN not in (left, right) and _follows(name, a, b, settings):
            continue
        yield FieldDifference(name, left, right)


def _follows(name: str, a: RunFacts, b: RunFacts, settings: Sequence[str]) -> bool:
    if name in a.requested and a.requested[name] != b.requested.get(name):
        return True
    # Every knob depends on the device.
    causes = _FOLLOWS.get(name, ("machine.device",) if name in a.requested else ())
    return any(s == cause or s.startswith(f"{cause}.") for s in settings for cause in causes)


def _is_digest(text: str) -> bool:
    return " " not in text


def _same(left: Any, right: Any) -> bool:
    return UNKNOWN not in (left, right) and left == right


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"
