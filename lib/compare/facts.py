"""All that may change a run's loss, as one flat table of a run directory.

Three kinds of fields: what the configuration says (``optimizer.beta1``), what was observed
(``torch``, ``knobs.precision_mode``), and the code. A field that a manifest does not have is
UNKNOWN, and that equals nothing, not even itself.
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

# Stands for a fact that nobody wrote down.
UNKNOWN = "unknown"
# Stands for a setting of a part that the other run does not have.
ABSENT = "-"

# Field → where the manifest has it.
_OBSERVED = {
    "data": ("data", "digest"),
    "tokenizer": ("data", "tokenizer", "digest"),
    "split": ("data", "split"),
    "torch": ("origin", "torch"),
    # Its compiler, BLAS and oneDNN.
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
# What the speed of a run depends on beyond that.
_SPEED = {
    "gpu": ("hardware", "gpu_name"),
    "driver": ("hardware", "driver_version"),
    "debug_flags": ("debug_flags",),
}
# Settings of these knobs change the speed alone.
_SPEED_KNOBS = ("expandable_segments", "num_workers", "pin_memory", "prefetch_factor")
_SPEED_KNOBS += ("persistent_workers", "compile_warmup_steps")


@dataclass(frozen=True)
class Facts:
    """One run, as its directory describes it."""

    run: RunDir
    # Path → value of the identity; a part's name stands under the part's own path.
    settings: Mapping[str, Any]
    observed: Mapping[str, Any]
    # Knob → what was asked for; a knob observed otherwise for that reason is no surprise.
    requested: Mapping[str, Any]
    # File → SHA-256, for all code that can change the result and was loaded.
    sources: Mapping[str, str]
    # Beyond all that, what the speed depends on.
    speed: Mapping[str, Any]
    symbols: Mapping[str, Any]

    def value(self, field: str) -> Any:
        """What ``field`` is: an observed fact, ``code``, a setting or a symbol. KeyError if none."""
        if field == "code":
            return code_digest(self.sources, self.sources)
        for table in (self.observed, self.settings, self.symbols):
            if field in table:
                return table[field]
        raise KeyError(field)


def read_facts(run: RunDir) -> Facts:
    """The facts of a run directory. ConfigError where its records are missing or unreadable."""
    try:
        resolved = json.loads(run.resolved_config.read_text())
        manifest = json.loads(run.manifest.read_text())
        return _facts(run, resolved, manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot be compared: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, str(run.path))) from None


def code_digest(sources: Mapping[str, str], names: Sequence[str] | Mapping[str, str]) -> str:
    """The first twelve hex digits over the files ``names`` of ``sources``."""
    content = canonical_json({name: sources[name] for name in sorted(names)})
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def flatten(identity: Any, path: str = "") -> dict[str, Any]:
    """Path → value: ``{"optimizer": {"name": "adamw", "eps": 1}}`` is optimizer, optimizer.eps.

    The parts of a list stand under their names, so that their order is no matter.
    """
    if isinstance(identity, Mapping):
        found = {path: identity["name"]} if path and "name" in identity else {}
        for key, value in identity.items():
            if not (path and key == "name"):
                found |= flatten(value, f"{path}.{key}" if path else key)
        return found
    if isinstance(identity, list) and any(isinstance(item, Mapping) for item in identity):
        found = {}
        for item in identity:
            found |= flatten(item, f"{path}.{item['name']}")
        return found
    if isinstance(identity, list):
        return {path: identity} if identity else {}
    return {path: identity}


def _facts(
    run: RunDir,
    resolved: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> Facts:
    observed = {name: at(manifest, place) for name, place in _OBSERVED.items()}
    observed["documents"] = _documents(run)
    observed["oom_fallbacks"] = _fallbacks(manifest)
    knobs = at(manifest, ("knobs",))
    named = knobs if isinstance(knobs, Mapping) else {}
    speed = {name: at(manifest, place) for name, place in _SPEED.items()}
    for name, knob in named.items():
        table = speed if name in _SPEED_KNOBS else observed
        seen = knob["observed"]
        # Which of several alike it was is no matter.
        table[f"knobs.{name}"] = str(seen).partition(":")[0] if name == "device" else seen
    sources = at(manifest, ("origin", "sources"))
    return Facts(
        run=run,
        settings=flatten(resolved["identity"]),
        observed=observed,
        requested={f"knobs.{name}": knob["requested"] for name, knob in named.items()},
        sources=sources if isinstance(sources, Mapping) else {},
        speed=speed,
        symbols=resolved["symbols"],
    )


def at(record: Any, place: Sequence[str]) -> Any:
    """What stands at ``place``, key by key, in a record; UNKNOWN where it does not."""
    for key in place:
        if not isinstance(record, Mapping) or key not in record:
            return UNKNOWN
        record = record[key]
    return record


def _documents(run: RunDir) -> str:
    """Digest of every evaluation document and its predicted tokens, in their order."""
    items = read_items(run.per_query)
    documents = [[item.item_id, item.tokens_sha256, item.n_tokens] for item in items]
    return hashlib.sha256(canonical_json(documents).encode()).hexdigest()


def _fallbacks(manifest: Mapping[str, Any]) -> Any:
    """What was changed for want of memory; how much there was is the machine's affair."""
    found = at(manifest, ("oom_fallbacks",))
    if not isinstance(found, list):
        return UNKNOWN
    return [{k: v for k, v in step.items() if k != "peak_bytes"} for step in found]
