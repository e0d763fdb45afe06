"""Fields in which two runs differ, apart from fields expected to differ.

An observed fact that follows from a setting (such as the attention kernel from the mechanism) is
not reported if that setting differs: the setting is reported instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.compare.facts import ABSENT, UNKNOWN, Facts, code_digest

_MAX_FILES_SHOWN = 3
_MAX_VALUE_CHARS = 60
_KERNEL = ("model", "machine", "train.batch_size")
# Observed fact → settings that determine it; a path includes all paths below it.
_FOLLOWS = {
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
    "variables.CUBLAS_WORKSPACE_CONFIG": ("machine",),
}


@dataclass(frozen=True)
class Difference:
    """One field and its values in both runs."""

    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.a)}, {_shown(self.b)}"


def differences(a: Facts, b: Facts, names: Mapping[str, str] | None = None) -> list[Difference]:
    """Return every field that can change a loss and is not known to be equal, settings first.

    ``names`` maps setting paths to the names to report, such as symbols.
    """
    paths = _differing_settings(a, b)
    settings = [
        Difference((names or {}).get(p, p), a.settings.get(p, ABSENT), b.settings.get(p, ABSENT))
        for p in paths
    ]
    return [*settings, *_observed(a, b, paths), *code_differences(a, b)]


def observed_differences(a: Facts, b: Facts) -> list[Difference]:
    """Return differing observed facts and code of runs whose settings differ on purpose."""
    return [*_observed(a, b, _differing_settings(a, b)), *code_differences(a, b)]


def speed_differences(a: Facts, b: Facts) -> list[Difference]:
    """Return further differences that make the speeds of two runs incomparable."""
    return [
        Difference(name, a.speed.get(name, UNKNOWN), b.speed.get(name, UNKNOWN))
        for name in sorted({*a.speed, *b.speed})
        if not _same(a.speed.get(name, UNKNOWN), b.speed.get(name, UNKNOWN))
    ]


def code_differences(a: Facts, b: Facts) -> Iterator[Difference]:
    """Yield a difference if files that both runs loaded are not identical.

    A file loaded by only one run follows from the settings: a file that both runs share imports it.
    """
    shared = sorted(a.sources.keys() & b.sources.keys())
    if not shared:
        yield Difference("code", UNKNOWN, UNKNOWN)
        return
    # A file edited after loading has a fixed text in place of a digest, equal in both runs.
    changed = [n for n in shared if a.sources[n] != b.sources[n] or not _is_digest(a.sources[n])]
    if changed:
        shown = " ".join(changed[:_MAX_FILES_SHOWN]) + (" …" if changed[_MAX_FILES_SHOWN:] else "")
        yield Difference(
            "code",
            f"{code_digest(a.sources, shared)} ({shown})",
            code_digest(b.sources, shared),
        )


def _differing_settings(a: Facts, b: Facts) -> list[str]:
    """Return the differing paths, without paths below a component that only one run has."""
    paths = [
        path
        for path in sorted({*a.settings, *b.settings})
        if a.settings.get(path, ABSENT) != b.settings.get(path, ABSENT)
    ]
    one_sided = {path for path in paths if path not in a.settings or path not in b.settings}
    return [p for p in paths if p not in one_sided or not any(map(p.startswith, _below(paths)))]


def _below(paths: Sequence[str]) -> list[str]:
    return [f"{path}." for path in paths]


def _observed(a: Facts, b: Facts, settings: Sequence[str]) -> Iterator[Difference]:
    for name in sorted({*a.observed, *b.observed}):
        left, right = (facts.observed.get(name, UNKNOWN) for facts in (a, b))
        if _same(left, right):
            continue
        if UNKNOWN not in (left, right) and _follows(name, a, b, settings):
            continue
        yield Difference(name, left, right)


def _follows(name: str, a: Facts, b: Facts, settings: Sequence[str]) -> bool:
    """Return whether the fact differs because of a differing request or setting."""
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
