"""Everything else that may change a result or its cost, in groups that a reader asks for by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lib.compare.facts import UNKNOWN, at
from lib.compare.keys import Difference, differences
from lib.verify.evidence import Evidence
from lib.verify.rows import Remark, Row, Verdict, row, spread

LENGTH, SOFTWARE, OTHERS = "training length", "software", "other settings and kernels"
# Group → beginnings of fields of lib.compare, and of paths of the identity.
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
# Group → name → where the manifest, or the summary, has what lib.compare does not look at.
_MORE: Mapping[str, Mapping[str, Sequence[str]]] = {
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
# Name → the settings that decide it: where one is declared to differ, it may too.
_FOLLOWS = {
    "torch_compile_enabled": ("machine.compile",),
    "tokens_per_iteration": ("train.global_batch", "model.shape.block_size"),
    "eval_batch": ("train.batch_size",),
    **dict.fromkeys(_HARDWARE, ("machine.device",)),
}
# Shown in a row of its own, and free to differ.
_SEED = "seed"


def group_rows(
    runs: Sequence[Evidence],
    names: Mapping[str, str],
    said: Mapping[str, str],
    remarks: Mapping[str, Sequence[Remark]],
) -> list[Row]:
    """A row for each group, every run against the first.

    ``names`` calls settings by their symbols; ``said`` is what a row says that passes, and
    ``remarks`` are reasons that the caller has found besides.
    """
    found: list[tuple[str, Difference]] = []
    declared: dict[str, str] = {}
    for each in runs[1:]:
        for difference in differences(runs[0].facts, each.facts):
            symbol = names.get(difference.field, difference.field)
            if symbol in runs[0].axis | each.axis:
                declared[difference.field] = symbol
            elif difference.field != _SEED:
                found.append((each.name, difference))
    rows = []
    for group in _FIELDS:
        text = said.get(group, "the same")
        if symbols := [s for field, s in declared.items() if _group(field) == group]:
            text += f"; declared to differ: {', '.join(symbols)}"
        within = [(run, d) for run, d in found if _group(d.field) == group]
        reasons = [*_told(runs, names, within), *_more(runs, group, declared)]
        rows.append(row(group, text, [*reasons, *remarks.get(group, ())]))
    return rows


def package_remarks(runs: Sequence[Evidence]) -> list[Remark]:
    """Packages that two runs have in different versions; one that only one has does no harm."""
    remarks = []
    first = runs[0].of("environment", "packages")
    for each in runs:
        packages = each.of("environment", "packages")
        if not isinstance(packages, Mapping) or not isinstance(first, Mapping):
            what = f"no packages are recorded of {each.name} or {runs[0].name}"
            remarks.append(Remark(Verdict.UNKNOWN, what, each.name))
            continue
        for name in sorted(first.keys() & packages.keys()):
            if first[name] != packages[name]:
                both = [(runs[0].name, first[name]), (each.name, packages[name])]
                remarks.append(Remark(Verdict.FAIL, f"package {name}: {spread(both)}", each.name))
    return remarks


def _group(field: str) -> str:
    return next(group for group, starts in _FIELDS.items() if field.startswith(starts))


def _told(
    runs: Sequence[Evidence], names: Mapping[str, str], found: Sequence[tuple[str, Difference]]
) -> Iterator[Remark]:
    """A remark for each field, with the value of every run."""
    for field in dict.fromkeys(difference.field for _, difference in found):
        values: dict[str, Any] = {run: d.b for run, d in found if d.field == field}
        first = next(d.a for _, d in found if d.field == field)
        told = spread((each.name, values.get(each.name, first)) for each in runs)
        verdict = Verdict.UNKNOWN if UNKNOWN in (first, *values.values()) else Verdict.FAIL
        for run in values:
            yield Remark(verdict, f"{names.get(field, field)}: {told}", run)


def _more(runs: Sequence[Evidence], group: str, declared: Mapping[str, str]) -> Iterator[Remark]:
    for name, place in _MORE.get(group, {}).items():
        if declared.keys() & set(_FOLLOWS.get(name, ())):
            continue
        records = [each.summary if place[0] == "final" else each.manifest for each in runs]
        values = [(each.name, at(record, place)) for each, record in zip(runs, records)]
        known = [(run, value) for run, value in values if value != UNKNOWN]
        for run, value in values:
            if value == UNKNOWN:
                yield Remark(Verdict.UNKNOWN, f"no {name} is recorded of {run}", run)
            elif value != known[0][1]:
                yield Remark(Verdict.FAIL, f"{name}: {spread(known)}", run)
