"""Tables of a study's report: results, documents, mechanisms, fairness, samples, provenance."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from lib.json_files import MissingRecord, RecordError
from lib.report.html import Cell, Html, details, joined, table, tag
from lib.report.run_facts import code_digest
from lib.report.run_results import MissingResult, RunOrigin, RunResult
from lib.report.series import RowRuns, document_differences, final_statistics
from lib.report.table import ResultTable, TableRow
from lib.report.table_text import format_loss
from lib.report.verdict_text import verdict_colour, verdict_word
from lib.report.verdicts import ContrastVerdict
from lib.runs.record import UNKNOWN
from lib.units import format_duration, format_si, signed

_SHOWN_DOCUMENTS = 5
_SAMPLE_CHARS = 1200
_DIGEST_CHARS = 8


def results_table(rows: Sequence[RowRuns], flops: Mapping[str, float]) -> Html:
    """Return the losses and costs of every row; each loss is linked to the runs behind it."""
    steps = any(row.row.variant.parent for row in rows)
    pruned = any(row.row.sparsity for row in rows)
    # The runs of a factorial design are not compared, but its effects.
    compared = any(row.row.verdict_baseline for row in rows)
    header = ["#", "step" if steps else "run", "seeds", "val loss", "perplexity"]
    header += ["against baseline"] * compared
    header += ["parameters", "tokens", "FLOPs", "time"] + ["sparsity"] * pruned + ["state"]
    lines = [_result_row(row, flops, compared, pruned) for row in rows]
    note = (
        "Loss: nats per token, mean over seeds ± standard deviation. FLOPs and time are those of the "
        "training of one run. The runs behind a loss are shown when the pointer rests on it, and "
        "linked from the number of seeds."
    )
    left = (1, *((5,) if compared else ()), len(header) - 1)
    return joined([table(header, lines, left=left), tag("p", note, class_="note")])


def _result_row(
    row: RowRuns, flops: Mapping[str, float], compared: bool, pruned: bool
) -> list[Cell | str]:
    figures = row.row
    number, loss = figures.variant.number, figures.val_loss
    total = _flops(figures, flops)
    sources = "\n".join(_source(result) for result in row.results)
    seeds: str = str(len(row.results))
    if row.results:
        seeds = tag("a", seeds, href=f"#{run_anchor(row.results[0].run.path.name)}")
    cells: list[Cell | str] = [
        Cell("" if number is None else str(number), number),
        Cell(figures.name, title=figures.variant.title),
        Cell(seeds, len(row.results)),
        Cell(format_loss(loss).partition(" n=")[0], loss.mean if loss else None, title=sources),
        _number(figures.perplexity, ".2f"),
    ]
    if compared:
        cells.append(_verdict_cell(figures.verdict_baseline))
    cells += [
        _number(figures.parameters, ",d"),
        Cell("-" if figures.tokens is None else format_si(figures.tokens), figures.tokens),
        Cell("-" if total is None else f"{total:.2e}".replace("e+", "e"), total),
        _duration(figures.train_seconds),
    ]
    if pruned:
        cells.append(_number(figures.sparsity or None, ".1%"))
    return [*cells, figures.state]


def _source(result: RunResult) -> str:
    """Return the source of the loss of a run: seed, loss, folder with its hash, commit."""
    commit = _commit(result.origin)
    folder = result.run.path.name
    return f"seed {result.run.seed}: {result.final.val_loss:.4f}, {folder}, commit {commit}"


def _commit(origin: RunOrigin) -> str:
    edited = "" if origin.edited is False else f", edited: {origin.edited}"
    return (origin.commit or UNKNOWN)[:12] + edited.replace(": True", "")


def _verdict_cell(verdict: ContrastVerdict | None) -> Cell:
    if verdict is None:
        return Cell("")
    change = "" if verdict.difference is None else signed(verdict.difference)
    if not verdict.is_given:
        return Cell(f"{change} n={verdict.n}".strip(), verdict.difference, class_="muted")
    text = f"{change} {verdict_word(verdict)}".strip()
    return Cell(text, verdict.difference, class_=f"word {verdict_colour(verdict)}")


def _flops(row: TableRow, flops: Mapping[str, float]) -> float | None:
    per_token = flops.get(row.variant.slug)
    return None if per_token is None or row.tokens is None else per_token * row.tokens


def _number(value: float | None, form: str) -> Cell:
    return Cell("-" if value is None else format(value, form), value)


def _duration(seconds: float | None) -> Cell:
    return Cell("-" if seconds is None else format_duration(seconds), seconds)


# Documents.


def document_sections(rows: Sequence[RowRuns], figure: Html) -> Html:
    """Return which documents each row wins and loses against the baseline."""
    parts = []
    for row in rows:
        differences = document_differences(row)
        if len(differences) < 2:
            continue
        ordered = sorted(differences, key=lambda pair: (pair[1], pair[0]))
        lower = [pair for pair in ordered if pair[1] < 0]
        higher = [pair for pair in reversed(ordered) if pair[1] > 0]
        summary = f"{row.row.name}: {len(lower)} of {len(ordered)} lower"
        shown = [*lower[:_SHOWN_DOCUMENTS], *reversed(higher[:_SHOWN_DOCUMENTS])]
        lines: list[Sequence[Cell | str]]
        lines = [(name, Cell(signed(value), value)) for name, value in shown]
        parts.append(details(summary, table(("document", "Δ loss"), lines)))
    if not parts:
        return Html()
    note = (
        f"Of each step: the {_SHOWN_DOCUMENTS} documents with the largest gains and losses. "
        "per_query.csv of each run has all of them."
    )
    lists = tag("div", *parts, class_="grid")
    return joined([figure, lists, tag("p", note, class_="note")])


# Mechanisms.


def mechanism_sections(rows: Sequence[RowRuns], figures: Html) -> Html:
    """Return sparsity by layer, and the statistics of gates and attention, if a row has any."""
    parts: list[str] = []
    pruned = [row.row for row in rows if row.row.sparsity_by_layer]
    if pruned:
        layers = list(dict.fromkeys(layer for row in pruned for layer in row.sparsity_by_layer))
        lines: list[Sequence[Cell | str]] = [
            [row.name, *(_heat(row.sparsity_by_layer.get(n), 0, 1, ".1%") for n in layers)]
            for row in pruned
        ]
        parts += [tag("h3", "Sparsity by layer"), table(["step", *layers], lines)]
    if figures:
        note = "Statistics over training: means over layers (or extremes, as named) and seeds."
        parts += [tag("h3", "Gates and attention"), tag("p", note, class_="note"), figures]
    by_name: dict[str, list[tuple[str, list[float | None]]]] = {}
    for row in rows:
        for name, layers_of in final_statistics(row).items():
            by_name.setdefault(name, []).append((row.row.name, layers_of))
    grids = [details(name, _statistic_table(by_name[name])) for name in sorted(by_name)]
    if grids:
        note = "Last logged values by layer, means over seeds. Shading: from the lowest to the highest."
        parts += [tag("h3", "Final statistics by layer"), *grids, tag("p", note, class_="note")]
    return joined(parts)


def _statistic_table(lines: Sequence[tuple[str, list[float | None]]]) -> Html:
    values = [value for _, layers in lines for value in layers if value is not None]
    low, high = min(values, default=0.0), max(values, default=0.0)
    depth = max(len(layers) for _, layers in lines)
    header = ["step", *(f"h.{i}" for i in range(depth))]
    return table(
        header,
        [
            [
                name,
                *(_heat(value, low, high, ".3g") for value in [*layers, *[None] * depth][:depth]),
            ]
            for name, layers in lines
        ],
    )


def _heat(value: float | None, low: float, high: float, form: str) -> Cell:
    """Return a cell shaded by the position of the value between ``low`` and ``high``."""
    if value is None:
        return Cell("-")
    share = (value - low) / (high - low) if high > low else 0.0
    return Cell(format(value, form), value, style=f"--share:{share:.2f}", class_="heat")


# Fairness.


def fairness_table(rows: Sequence[RowRuns], flops: Mapping[str, float]) -> Html:
    """Return the conditions of every row; a condition that differs from the first row is marked."""
    done = [row for row in rows if row.results]
    if len(done) < 2:
        return Html()
    header = ("step", "parameters", "FLOPs", "tokens", "time", *_CONDITIONS)
    first = done[0]
    lines = [
        [
            row.row.name,
            _relative(row.row.parameters, first.row.parameters),
            _relative(flops.get(row.row.variant.slug), flops.get(first.row.variant.slug)),
            _relative(row.row.tokens, first.row.tokens),
            _relative(row.row.train_seconds, first.row.train_seconds, mark=False),
            *_conditions(row, first),
        ]
        for row in done
    ]
    note = (
        f"Relative to {first.row.name}; = is equal; FLOPs are those of a token. A marked condition differs: the step declares it, "
        "or the step is not compared. Differences of parameters and FLOPs up to 1 % are not marked."
    )
    grid = table(header, lines, left=(0, *range(5, len(header))))
    return joined([grid, tag("p", note, class_="note")])


_CONDITIONS = ("data", "documents", "torch", "device", "precision", "kernel", "code", "seeds")


def _conditions(row: RowRuns, first: RowRuns) -> list[Cell | str]:
    # Most seeds have the same code.
    sources = {id(r.facts.sources): r.facts.sources for r in (*row.results, *first.results)}
    shared = set.intersection(*map(set, sources.values()))
    expected, actual = (_condition_values(each, sorted(shared)) for each in (first, row))
    return [
        (
            "="
            if values == others and row is not first
            else Cell(", ".join(values), class_="" if values == others else "differs")
        )
        for values, others in zip(actual, expected, strict=True)
    ]


def _condition_values(row: RowRuns, shared: Sequence[str]) -> list[list[str]]:
    """Return the distinct values of each condition over the seeds."""
    columns: list[list[str]] = []
    for field in ("data", "documents", "torch", "device", "knobs.precision_mode", "attention"):
        values = [r.facts.observed.get(field, UNKNOWN) for r in row.results]
        columns.append(list(dict.fromkeys(_short(field, value) for value in values)))
    # A digest takes longer than a comparison, and most seeds have the same code.
    distinct: list[Mapping[str, str]] = []
    for result in row.results:
        if result.facts.sources not in distinct:
            distinct.append(result.facts.sources)
    codes = (code_digest(sources, shared)[:_DIGEST_CHARS] for sources in distinct)
    columns.append(list(dict.fromkeys(codes)))
    columns.append([_ranges([r.run.seed for r in row.results])])
    return columns


def _ranges(seeds: Sequence[int]) -> str:
    """Return sorted numbers as ``1–3, 7``."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _short(field: str, value: Any) -> str:
    return str(value)[:_DIGEST_CHARS] if field in ("data", "documents") else str(value)


def _relative(value: float | None, first: float | None, *, mark: bool = True) -> Cell:
    if value is None or not first:
        return Cell("-")
    change = value / first - 1
    text = "=" if value == first else f"{change:+.1%}".replace("-", "−")
    return Cell(text, change, class_="differs" if mark and abs(change) > 0.01 else "")


# Samples and provenance.


def sample_sections(rows: Sequence[RowRuns]) -> Html:
    """Return the text sample of the first seed of each row, if the runs wrote any."""
    parts = []
    for row in rows:
        if not row.results:
            continue
        result = row.results[0]
        try:
            text = result.facts.record.sample
        except MissingRecord:
            continue
        except RecordError as error:
            text = f"({error.problems[0].what})"
        cut = text[:_SAMPLE_CHARS] + ("…" if text[_SAMPLE_CHARS:] else "")
        parts.append(details(f"{row.row.name}, seed {result.run.seed}", tag("pre", cut)))
    return joined(parts)


def provenance_table(results: ResultTable) -> Html:
    """Return the origin of every figure: one line per planned run."""
    items = [item for part in results.parts for item in part.items]
    items.sort(
        key=lambda item: (item.run.variant.number or 0, item.run.variant.slug, item.run.seed)
    )
    header = (
        *("run", "seed", "val loss", "state", "config", "commit", "torch", "device"),
        *("data", "weights"),
    )
    lines = [_provenance_row(item) for item in items]
    ids = [run_anchor(item.run.path.name) for item in items]
    note = (
        "config: identity of the settings; data, weights: first digits of their SHA-256. "
        "manifest.json of each run has all of them."
    )
    left = (0, *range(3, len(header)))
    return joined([table(header, lines, left=left, ids=ids), tag("p", note, class_="note")])


def _provenance_row(item: RunResult | MissingResult) -> list[Cell | str]:
    run = item.run
    seed = Cell(str(run.seed), run.seed)
    if isinstance(item, MissingResult):
        state = Cell(item.state, class_="differs", title=item.reason)
        return [run.path.name, seed, "-", state, run.config.hash8, *("-" for _ in range(5))]
    origin, loss = item.origin, item.final.val_loss
    return [
        run.path.name,
        seed,
        Cell(f"{loss:.6f}", loss),
        "done",
        run.config.hash8,
        _commit(origin),
        origin.torch,
        origin.device,
        origin.data[:_DIGEST_CHARS],
        origin.weights[:_DIGEST_CHARS],
    ]


def run_anchor(name: str) -> str:
    """Return the id of a run's line; names of folders may contain any character."""
    return f"run-{hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"
