"""A finished run, evaluated again with rounded weights or as it is.

What comes of it lies in a folder of its own; the run's own files are only read.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.data import source, tokenizer
from gpt2.data.store import open_dataset
from gpt2.evaluate import Evaluator
from gpt2.items import items_of
from gpt2.quantized.schemes import quantize
from gpt2.trained import machine_here
from gpt2.weights.load import load_run
from lib.console import say
from lib.errors import DataError, Problem
from lib.files import sha256, write_atomic, write_json
from lib.machine.process import Process
from lib.machine.setup import set_up
from lib.repro.figures import evaluation_figures, expected_calibration_error
from lib.repro.per_query import to_csv
from lib.rundir import RunDir

SCHEMA_VERSION = 1


def evaluate_run(run: RunDir, config: Config, build_dir: Path, scheme: str) -> dict[str, Any]:
    """Evaluate the finished ``run`` on its own documents; the summary, which is written as well.

    PreflightError where the weights are missing or damaged, DataError where the data is not what
    the run was evaluated on.
    """
    dataset = open_dataset(config.data, build_dir, config.model.shape.vocab_size)
    _require_data_of(run, dataset.digest)
    config = replace(config, machine=machine_here(config.machine))
    device = set_up(config.machine, Process())
    model = load_run(run.path).to(device)
    rounded = quantize(model, scheme)
    evaluate = Evaluator(config, dataset.val, device)
    found = evaluate(model)
    assert found is not None
    words = tokenizer.load(config.data.tokenizer, source.downloads_folder(config.data, build_dir))
    step = json.loads(run.summary.read_text())["final"]["iterations"]
    items = items_of(found, evaluate, config.data.dataset, words, step)
    summary = {
        "schema_version": SCHEMA_VERSION,
        "run": run.path.name,
        "hash8": config.hash8,
        "seed": config.seed,
        "weights_sha256": sha256(run.weights),
        "data_digest": dataset.digest,
        "device": str(device),
        "quantization": rounded.record(),
        "final": {
            **evaluation_figures(items),
            "expected_calibration_error": expected_calibration_error(found.calibration),
        },
    }
    _write(run, scheme, to_csv(items), summary)
    return summary


def table(run: RunDir, summaries: list[dict[str, Any]]) -> str:
    """The result of the training and those that were found now, each labelled by its weights."""
    own = json.loads(run.summary.read_text())["final"]
    rows = [("weights", "val_loss", "delta", "accuracy", "stored_MB"), _row("trained", own, own)]
    for summary in summaries:
        made = summary["quantization"]
        label, stored = made["quantization_scheme"], f"{made['stored_bytes'] / 1e6:.3f}"
        rows.append((*_row(label, summary["final"], own)[:-1], stored))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _row(label: str, final: dict[str, Any], own: dict[str, Any]) -> tuple[str, ...]:
    loss, accuracy = final["val_loss"], final["token_accuracy"]
    return label, f"{loss:.6f}", f"{loss - own['val_loss']:+.6f}", f"{accuracy:.4f}", ""


def _require_data_of(run: RunDir, digest: str) -> None:
    recorded = json.loads(run.manifest.read_text())["data"]["digest"]
    if digest != recorded:
        what = f"the data is {digest}, and the run was evaluated on {recorded}"
        raise DataError(Problem(what, str(run.manifest), "give the run's own data back"))


def _write(run: RunDir, scheme: str, rows: str, summary: dict[str, Any]) -> None:
    """The summary last; says where they are, and whether unrounded weights gave the run's bytes."""
    folder = run.evaluation(scheme)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / run.per_query.name, rows)
    write_json(folder / run.summary.name, summary)
    say("EVAL", f"{folder}   val loss {summary['final']['val_loss']:.4f}")
    if scheme == "none":
        same = rows.encode() == run.per_query.read_bytes()
        text = "byte for byte" if same else "not byte for byte: another machine or torch?"
        say("EVAL" if same else "WARN", f"{run.per_query} is found again, {text}")
