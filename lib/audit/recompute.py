"""What follows from a run's own files, computed again: figures, rows, hashes. Imports no torch."""

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
    """The files of a run, each of them as its schema says."""

    manifest: dict[str, Any]
    summary: dict[str, Any]
    resolved: dict[str, Any]
    metrics: list[dict[str, Any]]
    items: list[Item]


def read_contents(run: RunDir) -> tuple[Contents | None, list[Finding]]:
    """All files, or None with what is wrong in them."""
    findings: list[Finding] = []
    objects = {
        path: _object(path, wanted, findings)
        for path, wanted in (
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
    """Where one file says other than follows from another."""
    return [
        *_figures(run, contents),
        *_calibration(run, contents.summary),
        *_rows(run, contents),
        *_shared(run, contents),
        *_log(run, contents),
    ]


def _object(path: Path, wanted: schema.Schema, findings: list[Finding]) -> dict[str, Any]:
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        findings.append(Finding(path.name, "a JSON object", str(error)))
        return {}
    findings.extend(schema.misfits(path.name, record, wanted))
    return record


def _metrics(path: Path, findings: list[Finding]) -> list[dict[str, Any]]:
    try:
        records = read_lines(path)
    except (OSError, ValueError) as error:
        findings.append(Finding(path.name, "a JSON object in each line", str(error)))
        return []
    for number, record in enumerate(records, 1):
        place, kind = f"{path.name}:{number}", record.get("kind")
        if kind in schema.ROWS:
            findings.extend(schema.misfits(place, record, schema.ROWS[kind]))
        else:
            kinds = ", ".join(schema.ROWS)
            findings.append(Finding(place, f"a kind, one of {kinds}", repr(kind)))
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
    """The summary from the rows; floats are equal to the last bit."""
    final, timing, name = contents.summary["final"], contents.summary["timing"], run.summary.name
    expected = evaluation_figures(contents.items)
    if not _gap(contents):
        expected["train_loss"] = train_loss(contents.metrics, final["iterations"])
    for field, value in expected.items():
        yield from differing(name, f"final.{field}", value, final[field])
    steps = {item.eval_step for item in contents.items}
    yield from differing(run.per_query.name, "eval_step", [final["iterations"]], [*steps])
    seconds = timing["train_seconds"]
    for field, speed in (
        ("mean_step_seconds", seconds / final["iterations"]),
        ("tokens_per_second", final["tokens"] / seconds),
    ):
        yield from differing(name, f"timing.{field}", speed, timing[field])


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
    """An iteration without a row, or with two; a last evaluation that is not the summary's."""
    name, final = run.metrics.name, contents.summary["final"]
    order = [*schema.ROWS]
    places = [(row["iteration"], order.index(row["kind"])) for row in contents.metrics]
    if places != sorted(set(places)):
        yield Finding(name, "rows in the order of iterations, each once", "others")
    if gap := _gap(contents):
        yield Finding(name, f"a row for each of {final['iterations']} iterations", gap)
    else:
        tokens = max(row["tokens"] for row in contents.metrics)
        yield from differing(name, "tokens", final["tokens"], tokens)
    last = contents.metrics[-1]
    if last["kind"] != "eval":
        yield Finding(name, "an evaluation in the last row", last["kind"])
        return
    yield from differing(name, "last iteration", final["iterations"], last["iteration"])
    for field in ("val_loss", "token_accuracy", "sparsity"):
        yield from differing(name, f"last {field}", final[field], last[field])


def _gap(contents: Contents) -> str:
    """The first iteration that has no row in its place, or one too many; "" where all have one."""
    iterations = [row["iteration"] for row in contents.metrics if row["kind"] == "train"]
    planned = contents.summary["final"]["iterations"]
    for expected, found in itertools.zip_longest(range(1, planned + 1), iterations):
        if expected != found:
            return f"iteration {found} for {expected}"
    return ""


def _shared(run: RunDir, contents: Contents) -> Iterator[Finding]:
    """Facts that two files have."""
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
        yield Finding(run.manifest.name, "the same first weights on each rank", "others")


def _log(run: RunDir, contents: Contents) -> Iterator[Finding]:
    """The log says by itself which run it is of."""
    if not run.logs.is_file():
        return
    text = run.logs.read_text(encoding="utf-8", errors="replace")
    manifest = contents.manifest
    words: Sequence[str] = (
        f"seed {manifest['seeds']['seed']} ",
        manifest["run"]["run_profile"],
        str(manifest["knobs"]["device"]["observed"]),
    )
    for word in words:
        if word not in text:
            yield Finding(run.logs.name, f"the words {word!r}", "none")
