"""Every column of table.csv, table.md, table.tex and the terminal, computed a second time.

The figures are computed here from numbers that the test writes into run directories, with its own
t distribution, on four seeds that are not 1 to 4 and differ in every figure.
"""

import csv
import io
import json
import math
import random
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.console import shown
from lib.report.columns import to_csv, to_latex, to_markdown, to_terminal
from lib.report.declarations import VerdictPlan
from lib.report.options import LookPlan
from lib.report.statistics import VerdictRule
from lib.report.study import read_study
from lib.runs.run import Run, RunVariant, run_name
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import MANIFEST, changed, seal, write_run
from tests.lib.report.conftest import Named
from tests.lib.report.documents import document_of

SEEDS = (3, 7, 11, 20)
PARENTS = {"base": "", "wide": "base", "gate": "wide"}
TITLES = {"base": "GPT-2", "wide": "a wider MLP", "gate": "a gate on it"}
FLOPS = {"base": 6.0e6, "wide": 7.5e6, "gate": 7.8e6}
ALPHA, POWER, MIB = 0.05, 0.8, 1024.0
# Part of alpha that the look spends, and the next one.
SHARE = 0.5
# Length in tokens of the evaluation documents, whose tokens have four bytes.
DOCUMENTS = {"x": 10, "y": 30}


@cache
def made() -> dict[tuple[str, int], dict[str, Any]]:
    """Return the figures that the run of a step and seed records."""
    draw, figures = random.Random(12), {}
    for seed in SEEDS:
        block = draw.gauss(0, 0.05)
        for step, effect, spread in (
            ("base", 0, 0.004),
            ("wide", -0.1, 0.004),
            ("gate", -0.15, 0.03),
        ):
            loss = 2.6 + block + effect + draw.gauss(0, spread)
            figures[step, seed] = {
                "val_loss": loss,
                "parameters": {"base": 1000, "wide": 1250, "gate": 1300}[step],
                "tokens": draw.randrange(40_000, 90_000),
                "sparsity": 0.0 if step == "base" else draw.uniform(0.3, 0.6),
                "train_seconds": draw.uniform(60, 4000),
                "tokens_per_second": draw.uniform(800, 2500),
                "mfu": [draw.uniform(0.1, 0.5) for _ in range(3)],
                "gpu": [draw.uniform(30, 99) for _ in range(2)],
                "used": [draw.uniform(8, 70) for _ in range(2)],
                "rss": [draw.uniform(1, 9) for _ in range(2)],
                "cpu": draw.uniform(3, 70),
                "run_id": f"id-{step}-{seed}",
                "commit": f"{step[0]}{seed}".ljust(40, "0"),
            }
    return figures


def write(folder: Path) -> list[Run[Named]]:
    """Write the runs; the seeds of a plan need not ascend."""
    runs = []
    for number, (step, parent) in enumerate(PARENTS.items()):
        variant = RunVariant(step, TITLES[step], number, parent)
        for seed in SEEDS if step != "wide" else SEEDS[::-1]:
            figures, config = made()[step, seed], Named(f"{step}x{seed:02d}")
            path = folder / "demo" / run_name(step, seed, config)
            runs.append(Run("demo", variant, seed, config, path))
            names = ("val_loss", "parameters", "tokens", "sparsity")
            run = write_run(
                path,
                identity=config.identity(),
                documents={n: (figures["val_loss"] * t, t // 3, t) for n, t in DOCUMENTS.items()},
                losses=(20.0, figures["val_loss"]),
                final={name: figures[name] for name in names},
            )
            record = json.loads(run.resolved_config.read_text()) | {"hash8": config.hash8}
            run.resolved_config.write_text(json.dumps(record))
            beside(run, figures)
    return runs


def beside(run: RunDir, figures: dict[str, Any]) -> None:
    """Write timing, MFU, telemetry and origin of a run."""
    summary = json.loads(run.summary.read_text())
    for name in ("train_seconds", "tokens_per_second"):
        summary["timing"][name] = figures[name]
    run.summary.write_text(json.dumps(summary))
    timing = {"iteration": 1, "tokens_per_second": 1.0, "written_at": 1.0}
    lines = (json.dumps({**timing, "mfu": mfu}) + "\n" for mfu in figures["mfu"])
    run.timing.write_text("".join(lines))
    # The first sample is from before the first step.
    samples = [sample(0.0, 1.0, 1.0, 0.0, 0.0)]
    values = zip(figures["gpu"], figures["used"], figures["rss"], strict=True)
    for i, (gpu, used, rss) in enumerate(values, 1):
        samples.append(sample(10.0 * i, gpu, used, rss, figures["cpu"] * i))
    run.telemetry.write_text("".join(json.dumps(each) + "\n" for each in samples))
    origin = {"code__git_sha": figures["commit"]}
    seal(run, changed(MANIFEST, **origin) | {"run": {"run_id": figures["run_id"]}})


def sample(at: float, gpu: float, used: float, rss: float, cpu: float) -> dict[str, Any]:
    """Return a record of telemetry.jsonl of one GPU of 80 GiB."""
    reading = {"index": 0, "compute_util": gpu, "memory_used_mib": used * MIB}
    reading |= {"memory_total_mib": 80 * MIB, "power_watts": None, "temperature_celsius": None}
    return {"ts": at, "rss_mib": rss * MIB, "cpu_seconds": cpu, "gpus": [reading]}


# The second computation.


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


def sd(values: list[float]) -> float:
    return statistics.stdev(values)


@cache
def t_tail(t: float, degrees: float) -> float:
    """Return P(T > t) for t >= 0 by Simpson's rule over the density."""
    scale = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
    places = np.linspace(0, t, 4001)
    weights = np.full(4001, 2.0)
    weights[1::2], weights[[0, -1]] = 4, 1
    density = (1 + places**2 / degrees) ** (-(degrees + 1) / 2)
    return 0.5 - scale * t / 4000 / 3 * float(weights @ density)


@cache
def t_quantile(tail: float, degrees: float) -> float:
    low, high = 0.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return low


def losses(step: str) -> list[float]:
    return [made()[step, seed]["val_loss"] for seed in SEEDS]


def differences(step: str, other: str) -> list[float]:
    return [a - b for a, b in zip(losses(step), losses(other), strict=True)]


CONTRASTS = [("wide", "base"), ("gate", "base"), ("gate", "wide")]


@cache
def p_values() -> dict[tuple[str, str], tuple[float, float]]:
    """Return p and Holm's p of each comparison under the rule own."""
    single = {}
    for pair in CONTRASTS:
        values = differences(*pair)
        t = abs(mean(values)) / sd(values) * math.sqrt(len(values))
        single[pair] = 2 * t_tail(t, len(values) - 1)
    corrected, largest = {}, 0.0
    for rank, (pair, p) in enumerate(sorted(single.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(CONTRASTS) - rank) * p / SHARE))
        corrected[pair] = (p, largest)
    return corrected


def more_seeds(step: str, other: str) -> int:
    """Return how many more seeds give a word with probability 0.8, in fives from 10 on."""
    values = differences(step, other)
    for n in range(len(values) + 1, 200):
        error = sd(values) / math.sqrt(n)
        limit = t_quantile(ALPHA * SHARE / (2 * len(CONTRASTS)), n - 1) + t_quantile(
            1 - POWER, n - 1
        )
        if limit * error <= abs(mean(values)):
            more = n - len(values)
            return more if more < 10 else 5 * math.ceil(more / 5)
    raise AssertionError


def word(step: str, other: str) -> str:
    if p_values()[step, other][1] > ALPHA:
        return "INCONCLUSIVE"
    return "BETTER" if mean(differences(step, other)) < 0 else "WORSE"


def interval(step: str, other: str) -> tuple[float, float]:
    values = differences(step, other)
    half = t_quantile(0.025, len(values) - 1) * sd(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def compared(step: str, kind: str) -> dict[str, Any]:
    """Return the fields of a comparison with the baseline or the parent; empty for the baseline."""
    names = [f"delta_{kind}", f"delta_{kind}_sd"]
    names += [f"{kind}_{end}" for end in ("verdict", "low", "high", "p", "p_own")]
    other = "base" if kind == "baseline" else PARENTS[step]
    if step == "base":
        return {**dict.fromkeys(names), f"delta_{kind}_n": 0}
    values, (p, corrected) = differences(step, other), p_values()[step, other]
    figures = [mean(values), sd(values), word(step, other), *interval(step, other), corrected, p]
    return {**dict(zip(names, figures, strict=True)), f"delta_{kind}_n": len(SEEDS)}


def over_seeds(step: str, name: str) -> float:
    return mean([made()[step, seed][name] for seed in SEEDS])


def machine(step: str) -> dict[str, float]:
    runs = [made()[step, seed] for seed in SEEDS]
    return {
        "tokens_per_second": over_seeds(step, "tokens_per_second"),
        "mfu": mean([sorted(run["mfu"])[1] for run in runs]),
        "gpu/compute_util_avg": mean([mean(run["gpu"]) for run in runs]),
        "gpu/memory_util_avg": mean([100 * mean(run["used"]) / 80 for run in runs]),
        "gpu/memory_used_peak_gb": mean([max(run["used"]) for run in runs]),
        # Between the first counted sample and the last one, ten seconds later.
        "process/cpu_cores": mean([run["cpu"] / 10 for run in runs]),
        "process/rss_peak_gb": mean([max(run["rss"]) for run in runs]),
    }


def expected(step: str) -> dict[str, Any]:
    """Return the row of a step in table.csv."""
    hashes = [f"{step}x{seed:02d}" for seed in SEEDS]
    runs = [made()[step, seed] for seed in SEEDS]
    return {
        "number": list(PARENTS).index(step),
        "slug": step,
        "parent": PARENTS[step],
        "n": 4,
        "val_loss": mean(losses(step)),
        "val_loss_sd": sd(losses(step)),
        "perplexity": math.prod(math.exp(loss) for loss in losses(step)) ** (1 / 4),
        **compared(step, "baseline"),
        **compared(step, "parent"),
        "comparisons": None if step == "base" else 3,
        "parameters": {"base": 1000, "wide": 1250, "gate": 1300}[step],
        "flops": FLOPS[step] * over_seeds(step, "tokens"),
        "tokens": over_seeds(step, "tokens"),
        "train_seconds": over_seeds(step, "train_seconds"),
        "sparsity": over_seeds(step, "sparsity"),
        "state": "done",
        "title": TITLES[step],
        **machine(step),
        "runs": " ".join(f"{step}-s{seed}-{h}" for seed, h in zip(SEEDS, hashes, strict=True)),
        "run_ids": " ".join(run["run_id"] for run in runs),
        "configurations": " ".join(hashes),
        "commits": " ".join(run["commit"] for run in runs),
    }


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict[str, Any]:
    runs = write(tmp_path_factory.mktemp("columns"))
    plan = VerdictPlan(VerdictRule("own"), looks=LookPlan((len(SEEDS), 60), (SHARE, SHARE)))
    document = document_of(read_study("demo", runs, plan=plan))
    for row in document["rows"]:
        row["flops_per_token"] = FLOPS[row["slug"]]
    return document


def test_csv(document):
    rows = list(csv.DictReader(io.StringIO(to_csv(document))))
    assert [row["slug"] for row in rows] == list(PARENTS)
    for row in rows:
        wanted = expected(row["slug"])
        assert sorted(row) == sorted(wanted)
        for column, value in wanted.items():
            if isinstance(value, float):
                assert float(row[column]) == pytest.approx(value, rel=1e-9, abs=1e-12), column
            else:
                assert row[column] == ("" if value is None else str(value)), column


# Texts of the columns.


def signed(value: float) -> str:
    return ("-" if value < 0 else "+") + f"{abs(value):.4f}"


def minutes(seconds: float) -> str:
    whole = round(seconds)
    hours = f"{whole // 3600}:" if whole >= 3600 else ""
    return f"{hours}{whole // 60 % 60:02d}:{whole % 60:02d}"


def change(step: str, other: str) -> str:
    if step == "base":
        return "-"
    values = differences(step, other)
    return f"{signed(mean(values))} ± {sd(values):.4f} n=4"


def half_interval(step: str, other: str) -> str:
    low, high = interval(step, other)
    return f"{signed(mean(differences(step, other)))} ± {(high - low) / 2:.4f}"


def words(step: str, other: str) -> str:
    if step == "base":
        return ""
    more = f" +{more_seeds(step, other)}" if word(step, other) == "INCONCLUSIVE" else ""
    return word(step, other) + more


def texts(step: str) -> dict[str, str]:
    """Return the row of a step in table.md and table.tex."""
    row = expected(step)
    return {
        "#": str(row["number"]),
        "step": step,
        "val loss": f"{row['val_loss']:.4f} ± {row['val_loss_sd']:.4f} n=4",
        "ppl": f"{row['perplexity']:.2f}",
        "Δ baseline": change(step, "base"),
        "Δ parent": change(step, PARENTS[step]),
        "params": f"{row['parameters']:,}",
        "FLOPs": f"{row['flops'] / 1e11:.2f}e11",
        "tokens": f"{row['tokens'] / 1000:.1f}k".replace(".0k", "k"),
        "time": minutes(row["train_seconds"]),
        "sparsity": "-" if step == "base" else f"{100 * row['sparsity']:.1f}%",
        "state": "done",
    }


def grid(lines: list[str], separator: str) -> list[dict[str, str]]:
    """Return the rows of a table, whose first line has the headings."""
    cells = [[cell.strip() for cell in line.split(separator)] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def markdown_grid(text: str, heading: str) -> list[dict[str, str]]:
    lines = [
        x[2:-2] for x in text.partition(heading)[2].split("\n\n")[1].splitlines() if x[:1] == "|"
    ]
    return grid([lines[0], *lines[2:]], " | ")


def test_markdown_and_latex(document):
    text = to_latex(document)
    for code, plain in ((r"\ensuremath{\pm}", "±"), (r"\ensuremath{\Delta}", "Δ")):
        text = text.replace(code, plain)
    body = text.partition(r"\toprule")[2].replace("\\%", "%").replace("\\#", "#")
    lines = [line.removesuffix(r" \\") for line in body.splitlines() if "&" in line]
    for rows in (grid(lines, " & "), markdown_grid(to_markdown(document), "# demo")):
        assert list(rows[0]) == list(texts("base"))
        assert rows == [texts(step) for step in PARENTS]


def test_verdicts_of_markdown(document):
    assert markdown_grid(to_markdown(document), "## Verdicts") == [
        {
            "step": step,
            "against": other,
            "Δ ± 95 %": half_interval(step, other),
            "n": "4",
            "p": f"{p_values()[step, other][1]:.2g}",
            "verdict": words(step, other),
        }
        for step, other in CONTRASTS
    ]
    # The fixture has a word, and a comparison that needs more seeds.
    assert {words(*pair).split()[0] for pair in CONTRASTS} == {"BETTER", "INCONCLUSIVE"}
    assert any("+" in words(*pair) for pair in CONTRASTS)


HEADINGS = {
    "tok/s": ("tokens_per_second", "{:,.0f}"),
    "MFU": ("mfu", "{:.1%}"),
    "GPU %": ("gpu/compute_util_avg", "{:.0f}"),
    "GPU memory %": ("gpu/memory_util_avg", "{:.0f}"),
    "GPU GB, peak": ("gpu/memory_used_peak_gb", "{:.2f}"),
    "cores": ("process/cpu_cores", "{:.2f}"),
    "RSS GB, peak": ("process/rss_peak_gb", "{:.2f}"),
}


def test_machine_of_markdown(document):
    assert markdown_grid(to_markdown(document), "## Machine") == [
        {"run": step}
        | {head: form.format(machine(step)[name]) for head, (name, form) in HEADINGS.items()}
        for step in PARENTS
    ]


def terminal_texts(step: str) -> dict[str, str]:
    row, whole = expected(step), texts(step)
    return {
        "step": f"{row['number']} {step}",
        "val loss": f"{row['val_loss']:.4f}",
        "ppl": whole["ppl"],
        "n": "4",
        "Δ baseline": "-" if step == "base" else half_interval(step, "base"),
        "verdict": words(step, "base"),
        **{name: whole[name] for name in ("params", "tokens", "time", "sparsity")},
        "title": TITLES[step],
    }


def test_terminal(document):
    head, *lines = shown(to_terminal(document, 200), colour=False).splitlines()[:4]
    assert re.split(r" {2,}", head) == list(terminal_texts("base"))
    for step, line in zip(PARENTS, lines, strict=True):
        for column, wanted in terminal_texts(step).items():
            # The text stands below its heading, flush with one of its ends.
            at = head.index(column)
            ends = line[at : at + len(wanted)], line[: at + len(column)][-len(wanted) :]
            assert not wanted or wanted in ends, (step, column)


def test_origin_names_every_run(document):
    for text in (to_markdown(document), to_latex(document)):
        for step in PARENTS:
            row = expected(step)
            (line,) = (x for x in text.splitlines() if re.match(rf"(- |% ){step}: commit ", x))
            pairs = zip(row["runs"].split(), row["run_ids"].split(), strict=True)
            assert all(f"{run} ({id_})" in line for run, id_ in pairs)
            assert all(commit[:12] in line for commit in row["commits"].split())
