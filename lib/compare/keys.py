"""The fields in which two runs differ, less those that were to differ.

An observed fact that follows from a setting (a kernel from the mechanism that needs it) is not
counted where that setting differs: the setting itself is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.compare.facts import ABSENT, UNKNOWN, Facts, code_digest

_NAMED_FILES = 3
_WIDTH = 60
_KERNEL = ("model", "machine", "train.batch_size")
# Observed → settings that decide it; a path stands for all below it.
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
    """One field and its two values."""

    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.a)}, {_shown(self.b)}"


def differences(a: Facts, b: Facts, names: Mapping[str, str] | None = None) -> list[Difference]:
    """Every field that may change a loss and is not known to be the same, settings first.

    ``names`` are the names to call settings by instead of their paths, such as symbols.
    """
    paths = _differing_settings(a, b)
    settings = [
        Difference((names or {}).get(p, p), a.settings.get(p, ABSENT), b.settings.get(p, ABSENT))
        for p in paths
    ]
    return [*settings, *_observed(a, b, paths), *code_differences(a, b)]


def observed_differences(a: Facts, b: Facts) -> list[Difference]:
    """The same between runs whose settings differ as they were meant to."""
    return [*_observed(a, b, _differing_settings(a, b)), *code_differences(a, b)]


def speed_differences(a: Facts, b: Facts) -> list[Difference]:
    """What keeps the speeds of two runs from being compared, beyond what keeps their losses."""
    return [
        Difference(name, a.speed.get(name, UNKNOWN), b.speed.get(name, UNKNOWN))
        for name in sorted({*a.speed, *b.speed})
        if not _same(a.speed.get(name, UNKNOWN), b.speed.get(name, UNKNOWN))
    ]


def code_differences(a: Facts, b: Facts) -> Iterator[Difference]:
    """Files that both loaded and that are not the same.

    What only one of them loaded follows from its settings: a file that both have imports it.
    """
    shared = sorted(a.sources.keys() & b.sources.keys())
    if not shared:
        yield Difference("code", UNKNOWN, UNKNOWN)
        return
    # A file edited after it was loaded has no digest, and its words are the same in both.
    other = [n for n in shared if a.sources[n] != b.sources[n] or not _is_digest(a.sources[n])]
    if other:
        named = " ".join(other[:_NAMED_FILES]) + (" …" if other[_NAMED_FILES:] else "")
        yield Difference(
            "code",
            f"{code_digest(a.sources, shared)} ({named})",
            code_digest(b.sources, shared),
        )


def _differing_settings(a: Facts, b: Facts) -> list[str]:
    """Paths, those below a part that only one run has left out."""
    found = [
        path
        for path in sorted({*a.settings, *b.settings})
        if a.settings.get(path, ABSENT) != b.settings.get(path, ABSENT)
    ]
    one_sided = {path for path in found if path not in a.settings or path not in b.settings}
    return [p for p in found if p not in one_sided or not any(map(p.startswith, _below(found)))]


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
    """Whether the fact differs because something else was asked for, and was had."""
    if name in a.requested and a.requested[name] != b.requested.get(name):
        return True
    # Every knob is one of the device's.
    causes = _FOLLOWS.get(name, ("machine.device",) if name in a.requested else ())
    return any(s == cause or s.startswith(f"{cause}.") for s in settings for cause in causes)


def _is_digest(text: str) -> bool:
    return " " not in text


def _same(left: Any, right: Any) -> bool:
    return UNKNOWN not in (left, right) and left == right


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
