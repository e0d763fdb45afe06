"""All facts of a run directory that can change its loss, as one flat table.

The table has three kinds of fields: settings (``optimizer.beta1``), observed facts (``torch``,
``knobs.precision_mode``) and the digests of the code. A field missing from a manifest is UNKNOWN,
and UNKNOWN compares unequal to everything, including itself.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.errors import ConfigError, Problem
from lib.files import canonical_json
from lib.repro.per_query import read_items
from lib.rundir import RunDir

# Value of a fact that was not recorded.
UNKNOWN = "unknown"
# Value of a setting of a component that the run does not have.
ABSENT = "-"

# Field → path in the manifest.
_OBSERVED = {
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
_SPEED = {
    "gpu": ("hardware", "gpu_name"),
    "driver": ("hardware", "driver_version"),
    "debug_flags": ("debug_flags",),
}
# Knobs that affect only the speed.
_SPEED_KNOBS = ("expandable_segments", "num_workers", "pin_memory", "prefetch_factor")
_SPEED_KNOBS += ("persistent_workers", "compile_warmup_steps")


@dataclass(frozen=True)
class Facts:
    """Settings, observed facts and code digests of one run, read from its directory."""

    run: RunDir
    # Path → value of the identity; the name of a component is the value at the component's path.
    settings: Mapping[str, Any]
    observed: Mapping[str, Any]
    # Knob → requested value; explains an observed value that differs for that reason.
    requested: Mapping[str, Any]
    # File → SHA-256 of all loaded code that can change the result.
    sources: Mapping[str, str]
    # Further facts that affect only the speed.
    speed: Mapping[str, Any]
    symbols: Mapping[str, Any]

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


def read_facts(run: RunDir) -> Facts:
    """Return the facts of a run directory.

    Raises ConfigError if a record is missing or unreadable.
    """
    try:
        resolved = json.loads(run.resolved_config.read_text())
        manifest = json.loads(run.manifest.read_text())
        return _facts(run, resolved, manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot be compared: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, str(run.path), code="run.damaged")) from None


def code_digest(sources: Mapping[str, str], names: Sequence[str] | Mapping[str, str]) -> str:
    """Return the first twelve hex digits of the digest over the files ``names`` of ``sources``."""
    content = canonical_json({name: sources[name] for name in sorted(names)})
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def flatten(identity: Any, path: str = "") -> dict[str, Any]:
    """Return path → value of a nested identity.

    ``{"optimizer": {"name": "adamw", "eps": 1}}`` gives ``optimizer`` and ``optimizer.eps``.
    Components in a list are keyed by their names, so their order does not matter.
    """
    if isinstance(identity, Mapping):
        flat = {path: identity["name"]} if path and "name" in identity else {}
        for key, value in identity.items():
            if not (path and key == "name"):
                flat |= flatten(value, f"{path}.{key}" if path else key)
        return flat
    if isinstance(identity, list) and any(isinstance(item, Mapping) for item in identity):
        flat = {}
        for item in identity:
            flat |= flatten(item, f"{path}.{item['name']}")
        return flat
    if isinstance(identity, list):
        return {path: identity} if identity else {}
    return {path: identity}


def _facts(
    run: RunDir,
    resolved: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> Facts:
    observed = {name: at(manifest, path) for name, path in _OBSERVED.items()}
    observed["documents"] = _documents(run)
    observed["oom_fallbacks"] = _fallbacks(manifest)
    knobs = at(manifest, ("knobs",))
    by_name = knobs if isinstance(knobs, Mapping) else {}
    speed = {name: at(manifest, path) for name, path in _SPEED.items()}
    for name, knob in by_name.items():
        table = speed if name in _SPEED_KNOBS else observed
        observed_value = knob["observed"]
        # The index among identical devices does not matter.
        table[f"knobs.{name}"] = (
            str(observed_value).partition(":")[0] if name == "device" else observed_value
        )
    sources = at(manifest, ("origin", "sources"))
    return Facts(
        run=run,
        settings=flatten(resolved["identity"]),
        observed=observed,
        requested={f"knobs.{name}": knob["requested"] for name, knob in by_name.items()},
        sources=sources if isinstance(sources, Mapping) else {},
        speed=speed,
        symbols=resolved["symbols"],
    )


def at(record: Any, place: Sequence[str]) -> Any:
    """Return the value at the key path ``place`` of a record; UNKNOWN if it is missing."""
    for key in place:
        if not isinstance(record, Mapping) or key not in record:
            return UNKNOWN
        record = record[key]
    return record


def _documents(run: RunDir) -> str:
    """Return the digest over all evaluation documents and their predicted tokens, in order."""
    items = read_items(run.per_query)
    documents = [[item.item_id, item.tokens_sha256, item.n_tokens] for item in items]
    return hashlib.sha256(canonical_json(documents).encode()).hexdigest()


def _fallbacks(manifest: Mapping[str, Any]) -> Any:
    """Return the fallbacks applied after running out of memory, without their peak memory."""
    steps = at(manifest, ("oom_fallbacks",))
    if not isinstance(steps, list):
        return UNKNOWN
    return [{k: v for k, v in step.items() if k != "peak_bytes"} for step in steps]
