"""Recomputation of a run's results from its own files: figures, rows, digests. Imports no torch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.audit import schema
from lib.audit.finding import Finding, differing, read_json, read_lines
from lib.repro.figures import evaluation_figures, expected_calibration_error, train_loss
from lib.repro.per_query import BadRow, Item, read_items
from lib.rundir import RunDir


@dataclass(frozen=True)
class Contents:
    """The parsed files of a run, validated against their schemas."""

    manifest: dict[str, Any]
    summary: dict[str, Any]
    resolved: dict[str, Any]
    metrics: list[dict[str, Any]]
    items: list[Item]


def read_contents(run: RunDir) -> tuple[Contents | None, list[Finding]]:
    """Read all files. Returns None and the findings if any file is invalid."""
    findings: list[Finding] = []
    objects = {
        path: _object(path, expected_schema, findings)
        for path, expected_schema in (
            (run.manifest, schema.MANIFEST),
            (run.summary, schema.SUMMARY),
            (run.resolved_config, schema.RESOLVED),
        )
    }
    metrics, items = _metrics(run.metrics, findings), _items(run.per_query, findings)
    if findings:
        return None, findings
    return Contents(*objects.values(), metrics, items), []


def disagreements(run: RunDir, contents: Contents) -> list[Finding]:
    """Return the findings of all cross-checks between the files of a run."""
    return [
        *_figures(run, contents),
        *_calibration(run, contents.summary),
        *_rows(run, contents),
        *_shared(run, contents),
        *_log(run, contents),
    ]


def _object(path: Path, expected_schema: schema.Schema, findings: list[Finding]) -> dict[str, Any]:
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        findings.append(Finding(path.name, "a JSON object", str(error)))
        return {}
    findings.extend(schema.misfits(path.name, record, expected_schema))
    return record


def _metrics(path: Path, findings: list[Finding]) -> list[dict[str, Any]]:
    try:
        records = read_lines(path)
    except (OSError, ValueError) as error:
        findings.append(Finding(path.name, "one JSON object per line", str(error)))
        return []
    for number, record in enumerate(records, 1):
        where, kind = f"{path.name}:{number}", record.get("kind")
        if kind in schema.ROWS:
            findings.extend(schema.misfits(where, record, schema.ROWS[kind]))
        else:
            kinds = ", ".join(schema.ROWS)
            findings.append(Finding(where, f"kind in {kinds}", repr(kind)))
    return records


def _items(path: Path, findings: list[Finding]) -> list[Item]:
    try:
        return read_items(path)
    except BadRow as error:
        findings.append(Finding(path.name, error.expected, error.found))
    except (OSError, ValueError) as error:
        findings.append(Finding(path.name, "rows", str(error)))
    return []


def _figures(run: RunDir, contents: Contents) -> Iterator[Finding]:
    """Recompute the summary from the rows; floats must be equal to the last bit."""
    final, timing, name = contents.summary["final"], contents.summary["timing"], run.summary.name
    expected = evaluation_figures(contents.items)
    if not _gap(contents):
        expected["train_loss"] = train_loss(contents.metrics, final["iterations"])
    for field, value in expected.items():
        yield from differing(name, f"final.{field}", value, final[field])
    steps = {item.eval_step for item in contents.items}
    yield from differing(run.per_query.name, "eval_step", [final["iterations"]], [*steps])
    seconds = timing["train_seconds"]
    for field, value in (
        ("mean_step_seconds", seconds / final["iterations"]),
        ("tokens_per_second", final["tokens"] / seconds),
    ):
        yield from differing(name, f"timing.{field}", value, timing[field])


def _calibration(run: RunDir, summary: Mapping[str, Any]) -> Iterator[Finding]:
    name, final, bins = run.summary.name, summary["final"], summary["calibration"]
    error = expected_calibration_error(bins)
    recorded = final["expected_calibration_error"]
    yield from differing(name, "final.expected_calibration_error", error, recorded)
    yield from differing(
        name, "Σ calibration.n_tokens", final["eval_tokens"], sum(bins["n_tokens"])
    )
    correct = sum(bins["n_correct"]) / final["eval_tokens"]
    yield from differing(name, "accuracy of calibration", final["token_accuracy"], correct)


def _rows(run: RunDir, contents: Contents) -> Iterator[Finding]:
    """Check that each iteration has one row and that the last evaluation equals the summary."""
    name, final = run.metrics.name, contents.summary["final"]
    order = [*schema.ROWS]
    keys = [(row["iteration"], order.index(row["kind"])) for row in contents.metrics]
    if keys != sorted(set(keys)):
        yield Finding(name, "rows in order of iteration without duplicates", "another order")
    if missing := _gap(contents):
        yield Finding(name, f"one row for each of {final['iterations']} iterations", missing)
    else:
        tokens = max(row["tokens"] for row in contents.metrics)
        yield from differing(name, "tokens", final["tokens"], tokens)
    last = contents.metrics[-1]
    if last["kind"] != "eval":
        yield Finding(name, "an eval row at the end", last["kind"])
        return
    yield from differing(name, "last iteration", final["iterations"], last["iteration"])
    for field in ("val_loss", "token_accuracy", "sparsity"):
        yield from differing(name, f"last {field}", final[field], last[field])


def _gap(contents: Contents) -> str:
    """Return a description of the first missing or extra training row; "" if there is none."""
    iterations = [row["iteration"] for row in contents.metrics if row["kind"] == "train"]
    planned = contents.summary["final"]["iterations"]
    for expected, recorded in itertools.zip_longest(range(1, planned + 1), iterations):
        if expected != recorded:
            return f"iteration {recorded} in place of {expected}"
    return ""


def _shared(run: RunDir, contents: Contents) -> Iterator[Finding]:
    """Compare the facts that two files record."""
    manifest, summary, resolved = contents.manifest, contents.summary, contents.resolved
    symbols, name = resolved["symbols"], run.manifest.name
    for field, expected, found in (
        ("seeds.seed", symbols.get("SEED"), manifest["seeds"]["seed"]),
        ("run.run_profile", symbols.get("RUN_PROFILE"), manifest["run"]["run_profile"]),
        ("run.hash8", resolved["hash8"], manifest["run"]["hash8"]),
        ("config.overrides", resolved["settings"], manifest["config"]["overrides"]),
    ):
        yield from differing(name, field, expected, found)
    name = run.summary.name
    yield from differing(name, "seed", symbols.get("SEED"), summary["seed"])
    yield from differing(name, "run_profile", symbols.get("RUN_PROFILE"), summary["run_profile"])
    for field in ("check_numerics", "detect_anomaly"):
        flag = manifest["debug_flags"][field]
        yield from differing(name, f"numerics.{field}", flag, summary["numerics"][field])
    if len(set(manifest["init_weights_digest"])) != 1:
        yield Finding(run.manifest.name, "equal initial weights on all ranks", "different digests")


def _log(run: RunDir, contents: Contents) -> Iterator[Finding]:
    """Check that the log contains the run's seed, profile and device."""
    if not run.logs.is_file():
        return
    text = run.logs.read_text(encoding="utf-8", errors="replace")
    manifest = contents.manifest
    expected: Sequence[str] = (
        f"seed {manifest['seeds']['seed']} ",
        manifest["run"]["run_profile"],
        str(manifest["knobs"]["device"]["observed"]),
    )
    for phrase in expected:
        if phrase not in text:
            yield Finding(run.logs.name, f"the text {phrase!r}", "none")
