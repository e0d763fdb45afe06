"""What differs between two configurations, printed as the kernel's diffconfig prints it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Diff:
    """Names only in A, in both with other values, and only in B."""

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


def render_diff(found: Diff) -> str:
    """``-NAME value``, `` NAME old -> new``, ``+NAME value``, one a line."""
    lines = [f"-{name} {value}" for name, value in found.removed.items()]
    lines += [f" {name} {old} -> {new}" for name, (old, new) in found.changed.items()]
    lines += [f"+{name} {value}" for name, value in found.added.items()]
    return "\n".join(lines)
