"""Text and JSON output of the comparison over several seeds."""

from dataclasses import asdict

from lib.analysis.finalists import Contrast, Group, Report
from lib.files import indented_json

SCHEMA_VERSION = 1


def finalists_text(report: Report) -> str:
    """Return the report as text: all losses first, then means, differences and p-values."""
    parts = [_group(group) for group in report.groups]
    parts += [_contrast(contrast) for contrast in report.contrasts]
    parts += [f"REFUSED  {problem}\n" for problem in report.problems]
    return "\n".join(parts)


def finalists_json(report: Report) -> str:
    """Return the report as one JSON document with sorted keys."""
    groups = [
        {
            "name": group.name,
            "loss": group.loss and asdict(group.loss),
            "problems": list(group.problems),
            "seeds": [
                {"directory": s.directory, "loss": s.loss, "seed": s.seed, "state": s.state}
                for s in group.seeds
            ],
        }
        for group in report.groups
    ]
    document = {
        "schema_version": SCHEMA_VERSION,
        "min_seeds": report.min_seeds,
        "groups": groups,
        "contrasts": [asdict(contrast) for contrast in report.contrasts],
        "problems": list(report.problems),
        "exit_code": report.exit_code,
    }
    return indented_json(document)


def _group(group: Group) -> str:
    values = [
        f"  seed {s.seed:<6} {s.state if s.loss is None else repr(s.loss)}" for s in group.seeds
    ]
    problems = [f"  REFUSED  {problem}" for problem in group.problems]
    lines = [group.name, *values, *problems]
    if group.loss is not None and group.loss.sd is not None:
        lines.append(
            f"  n={group.loss.n}, mean {group.loss.mean:.4f}, sd {group.loss.sd:.4f} nats per token"
        )
    return "\n".join(lines) + "\n"


def _contrast(contrast: Contrast) -> str:
    lines = [
        f"{contrast.name} against {contrast.against}: {contrast.difference:+.4f} nats per token"
    ]
    lines += [f"  changed    {change}" for change in contrast.changes]
    if contrast.paired is not None:
        lines.append(
            f"  paired     {_p(contrast.paired.p)} by the exact sign-flip test over "
            f"{contrast.paired.n} seeds; smallest possible p={contrast.paired_smallest_p:.2g}"
        )
    lines.append(
        f"  unpaired   {_p(contrast.unpaired_p)} by the exact permutation test; smallest possible "
        f"p={contrast.unpaired_smallest_p:.2g}"
    )
    return "\n".join(lines) + "\n"


def _p(p: float | None) -> str:
    return "p unknown" if p is None else f"p={p:.2g}"
