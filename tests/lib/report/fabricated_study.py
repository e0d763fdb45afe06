"""Fabricated studies: steps, seeds, curves, documents, statistics and samples of finished runs."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.runs.run import Run, RunVariant, run_name
from tests.lib.fabricated import MANIFEST, changed, seal, write_run
from tests.lib.report.conftest import Named

_TOKENS = 1024


def steps(count: int) -> list[RunVariant]:
    """Return a baseline and its descendants: every third step changes the step before it."""
    variants = [RunVariant("baseline", "GPT-2", 0)]
    for number in range(1, count):
        parent = variants[-1].slug if number % 3 == 0 else "baseline"
        variants.append(
            RunVariant(f"step-{number}", f"change {number}", number, parent, {"DROPOUT": "0.1"})
        )
    return variants


def write_study(
    folder: Path,
    variants: list[RunVariant],
    seeds: int,
    *,
    iterations: int = 120,
    documents: int = 25,
    study: str = "demo",
) -> list[Run[Named]]:
    """Write finished runs of every variant and seed. Return them in the order of a plan.

    Every second step is about 0.02 nats better per number, the others worse; seeds add 0.01.
    """
    runs = []
    for seed in range(1, seeds + 1):
        for variant in variants:
            config = Named(f"{variant.slug}{seed}")
            path = folder / study / run_name(variant.slug, seed, config)
            runs.append(Run(study, variant, seed, config, path))
            write_planned(runs[-1], iterations, documents)
    return runs


def write_planned(
    run: Run[Any],
    iterations: int,
    documents: int,
    *,
    symbols: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] = MANIFEST,
    offset: float | None = None,
) -> None:
    """Write the directory of a planned run as if it had finished, ``offset`` nats above 2.55."""
    source, lengths, number = (
        random.Random(run.path.name),
        random.Random(1),
        run.variant.number or 0,
    )
    block = random.Random(run.seed).gauss(0, 0.02)
    drawn = block + number * 0.004 * (-1) ** number + source.gauss(0, 0.01)
    offset = drawn if offset is None else offset
    rows = {}
    for i in range(documents):
        tokens = lengths.randrange(200, 2000)
        nats = tokens * (2.4 + 0.3 * lengths.random() + offset + source.gauss(0, 0.02))
        rows[f"corpus/text-{i:03d}"] = (nats, tokens // 3, tokens)
    loss = sum(nats for nats, _, _ in rows.values()) / sum(n for _, _, n in rows.values())
    final: dict[str, Any] = {"val_loss": loss, "parameters": 850_000 + 13_000 * (number % 5)}
    final |= {"tokens": iterations * _TOKENS, "iterations": iterations}
    if number % 7 == 1:
        shares = {f"h.{i}.attn.c_attn.weight": 0.4 + 0.05 * i for i in range(4)}
        sizes = dict.fromkeys(shares, 100)
        final |= {"sparsity": 0.475, "sparsity_by_layer": shares, "prunable_weights": sizes}
    directory = write_run(
        run.path,
        identity=run.config.identity(),
        symbols=symbols,
        documents=rows,
        losses=(6.0, loss),
        final=final,
    )
    directory.metrics.write_text(_metrics(iterations, loss, source, number % 2 == 1))
    directory.sample.write_text(f"The model of {run.path.name} says nothing much.\n")
    config = json.loads(directory.resolved_config.read_text()) | {"hash8": run.config.hash8}
    directory.resolved_config.write_text(json.dumps(config))
    summary = json.loads(directory.summary.read_text())
    summary["timing"]["train_seconds"] = 15.0 + number / 3
    directory.summary.write_text(json.dumps(summary))
    seal(directory, changed(manifest, final_weights_digest=source.randbytes(32).hex()))


def _metrics(iterations: int, final: float, source: random.Random, statistics: bool) -> str:
    lines = []
    for i in range(1, iterations + 1):
        expected = final + (6.0 - final) * math.exp(-6 * i / iterations)
        at = {"iteration": i, "tokens": i * _TOKENS}
        loss = expected + source.gauss(0, 0.03)
        lines.append({"kind": "train", **at, "lr": 1e-3, "loss": loss, "grad_norm": 1.0})
        if i % max(1, iterations // 6) == 0:
            lines.append({"kind": "eval", **at, "val_loss": expected, "sparsity": 0.0})
            if statistics:
                values = {
                    "ra_cross_token/gate_mean": [0.5 + i / iterations / (n + 3) for n in range(4)],
                    "mlp_attn_gate/gate_closed": [0.1, 0.2 * i / iterations, None, 0.3],
                }
                lines.append({"kind": "statistics", **at, "values": values})
    return "".join(json.dumps(line) + "\n" for line in lines)
