"""Differences between two configurations, in the format of the kernel's diffconfig."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Diff:
    """Settings only in A, in both with different values, and only in B."""

    removed: Mapping[str, str]
    changed: Mapping[str, tuple[str, str]]
    added: Mapping[str, str]


def diff(a: Mapping[str, str], b: Mapping[str, str]) -> Diff:
    """Compare two mappings of names to values."""
    return Diff(
        removed={name: a[name] for name in sorted(a.keys() - b.keys())},
        changed={n: (a[n], b[n]) for n in sorted(a.keys() & b.keys()) if a[n] != b[n]},
        added={name: b[name] for name in sorted(b.keys() - a.keys())},
    )


def render_diff(difference: Diff) -> str:
    """Format one line per setting: ``-NAME value``, `` NAME old -> new`` or ``+NAME value``."""
    lines = [f"-{name} {value}" for name, value in difference.removed.items()]
    lines += [f" {name} {old} -> {new}" for name, (old, new) in difference.changed.items()]
    lines += [f"+{name} {value}" for name, value in difference.added.items()]
    return "\n".join(lines)
