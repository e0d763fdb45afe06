"""Whether two runs are the same bytes, and if not, the first thing in which they part.

In the order in which a run comes by them: first weights, rows of metrics.jsonl, rows of
per_query.csv, final weights, summary. ``timing`` and logs are the machine's and the hour's.
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

# What sets the iterations of a kind of rows, and the text of statistics.
_INTERVALS = {"eval": "EVAL_INTERVAL", "statistics": "STATISTICS_INTERVAL"}
_ROWS = "STATISTICS_ROWS"
# Within a row, cause before effect; other fields come after these.
_CAUSAL = ("tokens", "progress", "lr", "loss", "val_loss", "grad_norm", "nll_sum", "n_correct")


@dataclass(frozen=True)
class Divergence:
    """The first field that differs, where it stands, and its two values."""

    # metrics.jsonl and the like
    file: str
    # "iteration 7", a document, a tensor
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
    """What was compared and found the same."""

    rows: int
    documents: int
    weights_sha256: str
    # Rows that one of the two made at other iterations, as its intervals say.
    rows_left_out: int

    def __str__(self) -> str:
        words = [
            f"{self.rows} rows of metrics.jsonl",
            f"{self.documents} documents",
            f"weights {self.weights_sha256[:12]}",
        ]
        if self.rows_left_out:
            words.append(f"{self.rows_left_out} rows of other intervals left out")
        return ", ".join(words)


def compare_bytes(a: RunDir, b: RunDir) -> Agreement | Divergence:
    """Compare two finished runs. ConfigError where a file is missing or unreadable."""
    try:
        left, right = _rows(a), _rows(b)
        skipped = _other_intervals(a, b, left, right)
        documents = list(zip(_documents(a), _documents(b)))
        found = next(_divergences(a, b, left, right, skipped), None)
        # Files that came to other numbers of rows, at last.
        found = found or _lengths(left, right, skipped, _documents(a), _documents(b))
        if found is not None:
            return found
        kept = sum(key not in skipped for key in left)
        return Agreement(kept, len(documents), sha256(a.weights), len(skipped))
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        what = f"cannot be compared: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, f"{a.path} and {b.path}")) from None


# What tells a row of metrics.jsonl from the others: its kind and its iteration.
_Key = tuple[str, int]
_Rows = Mapping[_Key, Mapping[str, Any]]


def _rows(run: RunDir) -> _Rows:
    return {(row["kind"], row["iteration"]): row for row in read_json_lines(run.metrics)}


def _documents(run: RunDir) -> list[dict[str, Any]]:
    with open(run.per_query, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _other_intervals(a: RunDir, b: RunDir, left: _Rows, right: _Rows) -> set[_Key]:
    """Rows that only one made because it was told another interval; statistics of other text too."""
    old, new = (json.loads(run.resolved_config.read_text())["symbols"] for run in (a, b))
    differ = {name for name in (*_INTERVALS.values(), _ROWS) if old.get(name) != new.get(name)}
    one_has = left.keys() ^ right.keys()
    skipped = {key for key in one_has if _INTERVALS.get(key[0]) in differ}
    if _ROWS in differ:
        skipped |= {key for key in left.keys() | right.keys() if key[0] == "statistics"}
    return skipped


def _divergences(
    a: RunDir, b: RunDir, left: _Rows, right: _Rows, skipped: set[_Key]
) -> Iterator[Divergence]:
    yield from _first_weights(a, b)
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
    """A CSV's number as a number, so that a difference can be told."""
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
    only = [
        key for key in (*left, *right) if key not in skipped and (key in left) != (key in right)
    ]
    if only:
        kind, iteration = min(only, key=lambda key: key[1])
        place = f"iteration {iteration}"
        here = (kind, iteration) in left
        return Divergence("metrics.jsonl", place, f"{kind} row", here, not here)
    if len(old) != len(new):
        return Divergence("per_query.csv", "the end", "documents", len(old), len(new))
    return None


def _first_weights(a: RunDir, b: RunDir) -> Iterator[Divergence]:
    digests = [json.loads(run.manifest.read_text())["init_weights_digest"][0] for run in (a, b)]
    if digests[0] != digests[1]:
        yield Divergence("manifest.json", "before step 1", "first weights", *digests)


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
                    a.weights.name, name, "is there", name in old.keys(), name in new.keys()
                )
                continue
            first, second = old.get_tensor(name), new.get_tensor(name)
            if first.shape != second.shape:
                yield Divergence(a.weights.name, name, "shape", first.shape, second.shape)
            elif first.tobytes() != second.tobytes():
                yield _element(a.weights.name, name, first.ravel(), second.ravel())
    yield Divergence(a.weights.name, "the file", "sha256", sha256(a.weights), sha256(b.weights))


def _element(file: str, tensor: str, old: np.ndarray, new: np.ndarray) -> Divergence:
    """The first element whose bits differ, of two flat arrays that are not the same bytes."""
    bits = f"u{old.itemsize}"
    at = int(np.flatnonzero(old.view(bits) != new.view(bits))[0])
    return Divergence(file, tensor, f"element {at}", float(old[at]), float(new[at]))


def _summaries(a: RunDir, b: RunDir) -> Iterator[Divergence]:
    old, new = (json.loads(run.summary.read_text())["final"] for run in (a, b))
    yield from _fields("summary.json", "final", old, new)
