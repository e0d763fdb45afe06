"""Comparison of two run directories: comparability, bitwise equality and loss differences.

Files are compared in the order in which a run writes them; ``timing`` and logs depend on the machine.
The spread of losses over documents does not estimate that over seeds: no p is computed from it.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors

from lib.console import folded, terminal_columns
from lib.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_COMPARABLE, ConfigError, Problem, visible
from lib.files import sha256_file
from lib.report.render import json_document
from lib.report.run_facts import field_differences, observed_facts, settings_of
from lib.runs.documents import DocumentResult, evaluation_metrics
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from lib.units import format_difference

# Kind of row → symbol that sets its interval.
_INTERVALS = {"eval": "EVAL_INTERVAL", "statistics": "STATISTICS_INTERVAL"}
# Symbol that sets the sequences behind the statistics rows.
_STATISTICS_ROWS = "STATISTICS_ROWS"
# Fields of a row in the order to compare, cause before effect; other fields follow.
_CAUSAL = ("tokens", "progress", "lr", "loss", "val_loss", "grad_norm", "nll_sum", "n_correct")


# A comparison, or a part of it, as JSON has it (``new_comparison``).
Comparison = dict[str, Any]


def compare_bitwise(a: RunRecord, b: RunRecord) -> Comparison:
    """Return ``first``, the first difference of two runs, or ``same``. Raises ConfigError."""
    left, right = (
        {
            (fields["kind"], row.iteration): fields
            for row, fields in zip(record.metrics, record.metrics_fields, strict=True)
        }
        for record in (a, b)
    )
    skipped = _other_intervals(a, b, left, right)
    try:
        if (difference := next(_differences(a, b, left, right, skipped), None)) is not None:
            names = ("file", "place", "field", "a", "b")
            return {"first": dict(zip(names, difference, strict=True))}
        same = {
            "rows": sum(key not in skipped for key in left),
            "documents": len(a.documents),
            "weights_sha256": sha256_file(a.run.weights),
            # That only one run has because the two runs use different intervals.
            "rows_left_out": len(skipped),
        }
        return {"same": same}
    except (OSError, safetensors.SafetensorError) as error:
        what = f"weights cannot be compared: {error}"
        where = f"{a.run.path} and {b.run.path}"
        raise ConfigError(Problem(what, where, code="run.damaged")) from None


# Kind and iteration identify a row of metrics.jsonl.
_Key = tuple[str, int]
_Rows = Mapping[_Key, Mapping[str, Any]]
# File, place in it such as "iteration 7", field, and both values.
_Difference = tuple[str, str, str, Any, Any]


def _other_intervals(a: RunRecord, b: RunRecord, left: _Rows, right: _Rows) -> set[_Key]:
    """Return the rows to skip because the runs use different intervals or statistics sequences."""
    symbols = (*_INTERVALS.values(), _STATISTICS_ROWS)
    changed = {name for name in symbols if a.symbols.get(name) != b.symbols.get(name)}
    skipped = {key for key in left.keys() ^ right.keys() if _INTERVALS.get(key[0]) in changed}
    if _STATISTICS_ROWS in changed:
        skipped |= {key for key in left.keys() | right.keys() if key[0] == "statistics"}
    return skipped


def _differences(
    a: RunRecord, b: RunRecord, left: _Rows, right: _Rows, skipped: set[_Key]
) -> Iterator[_Difference]:
    old, new = (record.manifest.value(list, "init_weights_digest")[0] for record in (a, b))
    if old != new:
        yield "manifest.json", "before step 1", "initial weights", old, new
    for key in (k for k in left if k not in skipped and k in right):
        yield from _fields("metrics.jsonl", f"iteration {key[1]}", left[key], right[key])
    for old, new in zip(a.documents, b.documents, strict=False):
        yield from _fields("per_query.csv", f"document {old.item_id}", vars(old), vars(new))
    weights = a.run.weights, b.run.weights
    old, new = map(sha256_file, weights)
    if old != new:
        yield from _fields(weights[0].name, "tensors", *map(_tensors, weights))
        yield weights[0].name, "the file", "sha256", old, new
    yield from _fields("summary.json", "final", *(r.summary.value(dict, "final") for r in (a, b)))
    # The lengths are last: a difference inside the common rows is the earlier one.
    one_sided = [key for key in left.keys() ^ right.keys() if key not in skipped]
    for kind, iteration in sorted(one_sided, key=lambda key: key[::-1])[:1]:
        key = kind, iteration
        yield "metrics.jsonl", f"iteration {iteration}", f"{kind} row", key in left, key in right
    if len(a.documents) != len(b.documents):
        yield "per_query.csv", "the end", "documents", len(a.documents), len(b.documents)


def _fields(
    file: str, place: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[_Difference]:
    for name in (*_CAUSAL, *sorted({*old, *new} - {*_CAUSAL})):
        if old.get(name) != new.get(name):
            yield file, place, name, old.get(name), new.get(name)


def _tensors(file: Path) -> dict[str, str]:
    """Return {name: type, shape and digest} of the tensors in a file of weights."""
    with safetensors.safe_open(file, framework="np") as weights:
        tensors = {name: weights.get_tensor(name) for name in [*weights.keys()]}
    return {
        name: f"{tensor.dtype} {[*tensor.shape]}, {sha256(tensor.tobytes()).hexdigest():.12}"
        for name, tensor in tensors.items()
    }


def compare_document_losses(
    a: Sequence[DocumentResult], b: Sequence[DocumentResult]
) -> dict[str, Any]:
    """Return losses over all tokens, in nats per token, and the spread of A - B over documents."""
    gaps = [(x.nll_sum - y.nll_sum) / x.n_tokens for x, y in zip(a, b, strict=True)]
    losses = [evaluation_metrics(documents)["val_loss"] for documents in (a, b)]
    return {
        "loss_a": losses[0],
        "loss_b": losses[1],
        "a_minus_b": losses[0] - losses[1],
        "documents": len(gaps),
        "mean_a_minus_b": statistics.fmean(gaps),
        "sd": statistics.stdev(gaps) if len(gaps) > 1 else None,
        "a_better": sum(gap < 0 for gap in gaps),
        "equal": sum(gap == 0 for gap in gaps),
    }


SCHEMA_VERSION = 4
BITWISE = "BITWISE"
DIVERGED = "DIVERGED"
NOT_COMPARABLE = "NOT COMPARABLE"
# Two runs that differ only in the declared fields.
COMPARED = "COMPARED"
_EXIT_CODES = {
    BITWISE: EXIT_DONE,
    COMPARED: EXIT_DONE,
    DIVERGED: EXIT_FAILED,
    NOT_COMPARABLE: EXIT_NOT_COMPARABLE,
}


def new_comparison(a: RunDir, b: RunDir | str, verdict: str, **parts: Any) -> Comparison:
    """Return two runs side by side. Differences are A - B, as those of verdicts are step - reference."""
    return {
        "a": str(a.path),
        "b": b if isinstance(b, str) else str(b.path),
        "verdict": verdict,
        # Why the runs are not comparable, one per field.
        "reasons": [],
        # Differences declared as the axis of comparison, and those declared as labels.
        "axis": [],
        "labels": [],
        # Of compare_bitwise, and of compare_document_losses.
        "same": None,
        "first": None,
        "losses": None,
        **parts,
    }


def compare_runs(
    a: RunRecord,
    b: RunRecord,
    names: Mapping[str, str],
    axis: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> Comparison:
    """Compare two finished runs, which may differ in ``axis`` and ``labels`` only."""
    for variable, fields in (("AXIS", axis), ("LABEL_BY", labels)):
        check_fields((a, b), names, fields, variable)
    differing = field_differences(a, b, names)
    if not differing:
        return compare_expected_equal(a, b)
    off_axis = [str(d) for d in differing if d.field not in {*axis, *labels}]
    if off_axis:
        return new_comparison(a.run, b.run, NOT_COMPARABLE, reasons=off_axis)
    other_text = {"documents", "data", "tokenizer"} & {d.field for d in differing}
    return new_comparison(
        a.run,
        b.run,
        COMPARED,
        axis=[str(d) for d in differing if d.field not in labels],
        labels=[str(d) for d in differing if d.field in labels],
        losses=None if other_text else compare_document_losses(a.documents, b.documents),
    )


def compare_expected_equal(a: RunRecord, b: RunRecord, labels: Sequence[str] = ()) -> Comparison:
    """Return BITWISE, or DIVERGED at the first differing field, for runs that must be equal."""
    outcome = compare_bitwise(a, b)
    verdict = BITWISE if "same" in outcome else DIVERGED
    return new_comparison(a.run, b.run, verdict, labels=list(labels), **outcome)


# Indent of a folded line of the text, below the values.
_CONTINUATION = " " * 13


def comparison_shown(comparison: Comparison, json: bool) -> tuple[int, str]:
    """Return the exit code of a comparison, and its JSON document, or its text folded to the terminal."""
    exit_code = _EXIT_CODES[comparison["verdict"]]
    if json:
        return exit_code, json_document(SCHEMA_VERSION, {**comparison, "exit_code": exit_code})
    columns = terminal_columns(sys.stdout)
    return exit_code, folded(comparison_to_text(comparison), columns, _CONTINUATION)


def comparison_to_text(comparison: Comparison) -> str:
    lines = [comparison["verdict"], f"  A  {comparison['a']}", f"  B  {comparison['b']}"]
    for heading, name in (("differs", "reasons"), ("axis", "axis"), ("label", "labels")):
        lines += [f"  {heading:9}  {difference}" for difference in comparison[name]]
    if same := comparison["same"]:
        lines.append(
            "  the same   {rows} rows of metrics.jsonl, {documents} documents, "
            "weights {weights_sha256:.12}".format(**same)
        )
        if left_out := same["rows_left_out"]:
            lines[-1] += f", {left_out} rows skipped because of different intervals"
    if first := comparison["first"]:
        lines.append("  first      {file}, {place}: {field} {a!r} and {b!r}".format(**first))
        if isinstance(first["a"], float) and isinstance(first["b"], float):
            lines[-1] += f", A - B = {first['a'] - first['b']:+.3g}"
    if comparison["losses"]:
        lines += _loss_lines(comparison["losses"])
    elif comparison["verdict"] == COMPARED:
        lines.append("  losses     not comparable: evaluated on different documents")
    return "".join(f"{visible(line)}\n" for line in lines)


def check_fields(
    records: Sequence[RunRecord], names: Mapping[str, str], fields: Sequence[str], variable: str
) -> None:
    """Raise ConfigError about the make variable if a field is in none of the runs."""
    tables = [t for r in records for t in (observed_facts(r), settings_of(r), r.symbols)]
    valid = {*names.values(), "code"}.union(*tables) if fields else ()
    expected = "expected a symbol or field of these runs"
    problems = [
        Problem(f"unknown field {name!r} ({expected})", variable, code="usage.unknown-field")
        for name in fields
        if name not in valid
    ]
    if problems:
        raise ConfigError(*problems)


def _loss_lines(losses: Mapping[str, Any]) -> list[str]:
    spread = "" if losses["sd"] is None else f", sd {losses['sd']:.4f}"
    share = losses["a_better"] / losses["documents"]
    gap, mean = (format_difference(losses[name]) for name in ("a_minus_b", "mean_a_minus_b"))
    both = f"A {losses['loss_a']:.4f}, B {losses['loss_b']:.4f}"
    return [
        f"  loss       A - B = {gap} nats per token ({both})",
        f"  documents  {losses['documents']}: mean A - B {mean}{spread}; A better on "
        f"{losses['a_better']} ({share:.0%}), equal on {losses['equal']}",
        "  one training each: this does not show an effect of the change, because two",
        "  seeds of one configuration differ too; train both with SEEDS=1,2,3, and type:",
        "  make verdicts SEEDS=1,2,3",
    ]
