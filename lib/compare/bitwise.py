"""Bitwise comparison of two runs that reports the first difference.

Files are compared in the order in which a run writes them: initial weights, rows of metrics.jsonl,
rows of per_query.csv, final weights, summary. ``timing`` and logs depend on the machine and are not
compared.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors

from lib.errors import ConfigError, Problem
from lib.files import read_json_lines, sha256
from lib.rundir import RunDir

# Kind of row → symbol that sets its interval.
_INTERVALS = {"eval": "EVAL_INTERVAL", "statistics": "STATISTICS_INTERVAL"}
# Symbol that sets the sequences behind the statistics rows.
_STATISTICS_ROWS = "STATISTICS_ROWS"
# Order of fields within a row, cause before effect; other fields follow.
_CAUSAL = ("tokens", "progress", "lr", "loss", "val_loss", "grad_norm", "nll_sum", "n_correct")


@dataclass(frozen=True)
class Divergence:
    """The first differing field, its location and both values."""

    # File name, such as "metrics.jsonl".
    file: str
    # Location in the file: "iteration 7", a document or a tensor.
    place: str
    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        gap = ""
        if isinstance(self.a, float) and isinstance(self.b, float):
            gap = f", {self.b - self.a:+.3g}"
        return f"{self.file}, {self.place}: {self.field} {self.a!r} and {self.b!r}{gap}"


@dataclass(frozen=True)
class Agreement:
    """Counts of the records compared and found identical."""

    rows: int
    documents: int
    weights_sha256: str
    # Rows that only one run has because the two runs use different intervals.
    rows_left_out: int

    def __str__(self) -> str:
        fields = [
            f"{self.rows} rows of metrics.jsonl",
            f"{self.documents} documents",
            f"weights {self.weights_sha256[:12]}",
        ]
        if self.rows_left_out:
            fields.append(f"{self.rows_left_out} rows skipped because of different intervals")
        return ", ".join(fields)


def compare_bytes(a: RunDir, b: RunDir) -> Agreement | Divergence:
    """Compare two finished runs. Raises ConfigError if a file is missing or unreadable."""
    try:
        left, right = _rows(a), _rows(b)
        skipped = _other_intervals(a, b, left, right)
        documents = list(zip(_documents(a), _documents(b)))
        divergence = next(_divergences(a, b, left, right, skipped), None)
        # Compare the lengths last: a difference inside the common rows is the earlier one.
        divergence = divergence or _lengths(left, right, skipped, _documents(a), _documents(b))
        if divergence is not None:
            return divergence
        compared = sum(key not in skipped for key in left)
        return Agreement(compared, len(documents), sha256(a.weights), len(skipped))
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        what = f"cannot be compared: {type(error).__name__}: {error}"
        where = f"{a.path} and {b.path}"
        raise ConfigError(Problem(what, where, code="run.damaged")) from None


# Kind and iteration identify a row of metrics.jsonl.
_Key = tuple[str, int]
_Rows = Mapping[_Key, Mapping[str, Any]]


def _rows(run: RunDir) -> _Rows:
    return {(row["kind"], row["iteration"]): row for row in read_json_lines(run.metrics)}


def _documents(run: RunDir) -> list[dict[str, Any]]:
    with open(run.per_query, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _other_intervals(a: RunDir, b: RunDir, left: _Rows, right: _Rows) -> set[_Key]:
    """Return the rows to skip because the runs use different intervals or statistics sequences."""
    old, new = (json.loads(run.resolved_config.read_text())["symbols"] for run in (a, b))
    changed = {
        name for name in (*_INTERVALS.values(), _STATISTICS_ROWS) if old.get(name) != new.get(name)
    }
    one_sided = left.keys() ^ right.keys()
    skipped = {key for key in one_sided if _INTERVALS.get(key[0]) in changed}
    if _STATISTICS_ROWS in changed:
        skipped |= {key for key in left.keys() | right.keys() if key[0] == "statistics"}
    return skipped


def _divergences(
    a: RunDir, b: RunDir, left: _Rows, right: _Rows, skipped: set[_Key]
) -> Iterator[Divergence]:
    yield from _initial_weights(a, b)
    for key in (k for k in left if k not in skipped and k in right):
        yield from _fields("metrics.jsonl", f"iteration {key[1]}", left[key], right[key])
    for old, new in zip(_documents(a), _documents(b)):
        yield from _fields("per_query.csv", f"document {old['item_id']}", old, new)
    yield from _final_weights(a, b)
    yield from _summaries(a, b)


def _fields(
    file: str, place: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[Divergence]:
    names = sorted({*old, *new}, key=lambda n: (_rank(n), n))
    for name in (n for n in names if old.get(n) != new.get(n)):
        yield Divergence(file, place, name, _number(old.get(name)), _number(new.get(name)))


def _rank(name: str) -> int:
    return _CAUSAL.index(name) if name in _CAUSAL else len(_CAUSAL)


def _number(value: Any) -> Any:
    """Return a decimal CSV value as float so that a difference can be computed."""
    try:
        return float(value) if isinstance(value, str) and "." in value else value
    except ValueError:
        return value


def _lengths(
    left: _Rows,
    right: _Rows,
    skipped: set[_Key],
    old: Sequence[Mapping[str, Any]],
    new: Sequence[Mapping[str, Any]],
) -> Divergence | None:
    one_sided = [
        key for key in (*left, *right) if key not in skipped and (key in left) != (key in right)
    ]
    if one_sided:
        kind, iteration = min(one_sided, key=lambda key: key[1])
        place = f"iteration {iteration}"
        in_left = (kind, iteration) in left
        return Divergence("metrics.jsonl", place, f"{kind} row", in_left, not in_left)
    if len(old) != len(new):
        return Divergence("per_query.csv", "the end", "documents", len(old), len(new))
    return None


def _initial_weights(a: RunDir, b: RunDir) -> Iterator[Divergence]:
    digests = [json.loads(run.manifest.read_text())["init_weights_digest"][0] for run in (a, b)]
    if digests[0] != digests[1]:
        yield Divergence("manifest.json", "before step 1", "initial weights", *digests)


def _final_weights(a: RunDir, b: RunDir) -> Iterator[Divergence]:
    if sha256(a.weights) == sha256(b.weights):
        return
    with (
        safetensors.safe_open(a.weights, framework="np") as old,
        safetensors.safe_open(b.weights, framework="np") as new,
    ):
        for name in sorted({*old.keys(), *new.keys()}):
            if name not in old.keys() or name not in new.keys():
                yield Divergence(
                    a.weights.name, name, "present", name in old.keys(), name in new.keys()
                )
                continue
            first, second = old.get_tensor(name), new.get_tensor(name)
            if first.shape != second.shape:
                yield Divergence(a.weights.name, name, "shape", first.shape, second.shape)
            elif first.tobytes() != second.tobytes():
                yield _element(a.weights.name, name, first.ravel(), second.ravel())
    yield Divergence(a.weights.name, "the file", "sha256", sha256(a.weights), sha256(b.weights))


def _element(file: str, tensor: str, old: np.ndarray, new: np.ndarray) -> Divergence:
    """Return the first element whose bits differ in two flat arrays of the same shape."""
    bits = f"u{old.itemsize}"
    index = int(np.flatnonzero(old.view(bits) != new.view(bits))[0])
    return Divergence(file, tensor, f"element {index}", float(old[index]), float(new[index]))


def _summaries(a: RunDir, b: RunDir) -> Iterator[Divergence]:
    old, new = (json.loads(run.summary.read_text())["final"] for run in (a, b))
    yield from _fields("summary.json", "final", old, new)
