"""Checklist rows for all other facts that can change a result or its cost, in named groups."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lib.compare.facts import UNKNOWN, at
from lib.compare.keys import Difference, differences
from lib.verify.evidence import Evidence
from lib.verify.rows import Remark, Row, Verdict, row, spread

LENGTH, SOFTWARE, OTHERS = "training length", "software", "other settings and kernels"
# Group → prefixes of lib.compare fields and of identity paths.
_FIELDS = {
    "hardware": ("device", "cpu_cap", "cuda", "hip", "world_size", "backend", "machine.device"),
    "compile": ("knobs.torch_compile_", "machine.compile"),
    "effective batch": ("batch", "train.global_batch", "train.batch_size", "train.grad_acc"),
    LENGTH: ("train.budget", "train.max_"),
    "evaluation": ("documents", "data.eval_"),
    "data and preprocessing": ("data", "tokenizer", "split"),
    SOFTWARE: ("torch", "cudnn", "reduced_precision", "variables."),
    "code": ("code", "changed_during_run"),
    OTHERS: ("",),
}
_HARDWARE = ("cpu_model", "cpu_cores", "gpu_name", "vram_gib", "driver_version")
# Group → name → path in the manifest or summary of facts that lib.compare does not read.
_EXTRA_FIELDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "hardware": {name: ("hardware", name) for name in _HARDWARE},
    "compile": {"torch_compile_enabled": ("knobs", "torch_compile_enabled", "observed")},
    "effective batch": {"tokens_per_iteration": ("batch", "tokens_per_iteration")},
    "evaluation": {
        "eval_tokens": ("final", "eval_tokens"),
        "eval_documents": ("final", "eval_documents"),
        "eval_batch": ("batch", "micro_batch"),
    },
    "data and preprocessing": {"dataset": ("data", "dataset"), "splits": ("data", "splits")},
    SOFTWARE: {"python": ("environment", "python_version")},
}
# Name → settings that determine it; it may differ if one of them is declared to differ.
_FOLLOWS = {
    "torch_compile_enabled": ("machine.compile",),
    "tokens_per_iteration": ("train.global_batch", "model.shape.block_size"),
    "eval_batch": ("train.batch_size",),
    **dict.fromkeys(_HARDWARE, ("machine.device",)),
}
# Reported in a separate row, and allowed to differ.
_SEED = "seed"


def group_rows(
    runs: Sequence[Evidence],
    names: Mapping[str, str],
    said: Mapping[str, str],
    remarks: Mapping[str, Sequence[Remark]],
) -> list[Row]:
    """Return one row per group, comparing every run with the first.

    ``names`` maps settings to symbols; ``said`` maps groups to the text of a passing row;
    ``remarks`` maps groups to further reasons found by the caller.
    """
    undeclared: list[tuple[str, Difference]] = []
    declared: dict[str, str] = {}
    for run in runs[1:]:
        for difference in differences(runs[0].facts, run.facts):
            symbol = names.get(difference.field, difference.field)
            if symbol in runs[0].axis | run.axis:
                declared[difference.field] = symbol
            elif difference.field != _SEED:
                undeclared.append((run.name, difference))
    rows = []
    for group in _FIELDS:
        text = said.get(group, "the same")
        if symbols := [s for field, s in declared.items() if _group(field) == group]:
            text += f"; declared to differ: {', '.join(symbols)}"
        within = [(run, d) for run, d in undeclared if _group(d.field) == group]
        reasons = [
            *_difference_remarks(runs, names, within),
            *_extra_remarks(runs, group, declared),
        ]
        rows.append(row(group, text, [*reasons, *remarks.get(group, ())]))
    return rows


def package_remarks(runs: Sequence[Evidence]) -> list[Remark]:
    """Return remarks on packages with different versions in two runs.

    A package that only one run has is ignored.
    """
    remarks = []
    first = runs[0].of("environment", "packages")
    for run in runs:
        packages = run.of("environment", "packages")
        if not isinstance(packages, Mapping) or not isinstance(first, Mapping):
            what = f"no packages recorded for {run.name} or {runs[0].name}"
            remarks.append(Remark(Verdict.UNKNOWN, what, run.name))
            continue
        for name in sorted(first.keys() & packages.keys()):
            if first[name] != packages[name]:
                both = [(runs[0].name, first[name]), (run.name, packages[name])]
                remarks.append(Remark(Verdict.FAIL, f"package {name}: {spread(both)}", run.name))
    return remarks


def _group(field: str) -> str:
    return next(group for group, starts in _FIELDS.items() if field.startswith(starts))


def _difference_remarks(
    runs: Sequence[Evidence], names: Mapping[str, str], undeclared: Sequence[tuple[str, Difference]]
) -> Iterator[Remark]:
    """Yield one remark per field with the value of every run."""
    for field in dict.fromkeys(difference.field for _, difference in undeclared):
        values: dict[str, Any] = {run: d.b for run, d in undeclared if d.field == field}
        first = next(d.a for _, d in undeclared if d.field == field)
        text = spread((evidence.name, values.get(evidence.name, first)) for evidence in runs)
        verdict = Verdict.UNKNOWN if UNKNOWN in (first, *values.values()) else Verdict.FAIL
        for run in values:
            yield Remark(verdict, f"{names.get(field, field)}: {text}", run)


def _extra_remarks(
    runs: Sequence[Evidence], group: str, declared: Mapping[str, str]
) -> Iterator[Remark]:
    for name, path in _EXTRA_FIELDS.get(group, {}).items():
        if declared.keys() & set(_FOLLOWS.get(name, ())):
            continue
        records = [run.summary if path[0] == "final" else run.manifest for run in runs]
        values = [(run.name, at(record, path)) for run, record in zip(runs, records)]
        known = [(run, value) for run, value in values if value != UNKNOWN]
        for run, value in values:
            if value == UNKNOWN:
                yield Remark(Verdict.UNKNOWN, f"no {name} recorded for {run}", run)
            elif value != known[0][1]:
                yield Remark(Verdict.FAIL, f"{name}: {spread(known)}", run)
