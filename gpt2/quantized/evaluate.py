"""Re-evaluation of a finished run, with quantized or original weights.

The results are written to a separate folder; the files of the run are read-only.
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
    """Evaluate the finished ``run`` on its validation documents; write and return the summary.

    Raises PreflightError if the weights are missing or damaged, DataError if the data differs from
    the data of the run.
    """
    dataset = open_dataset(config.data, build_dir, config.model.shape.vocab_size)
    _require_data_of(run, dataset.digest)
    config = replace(config, machine=machine_here(config.machine))
    device = set_up(config.machine, Process())
    model = load_run(run.path).to(device)
    rounded = quantize(model, scheme)
    evaluate = Evaluator(config, dataset.val, device)
    evaluation = evaluate(model)
    assert evaluation is not None
    vocabulary = tokenizer.load(
        config.data.tokenizer, source.downloads_folder(config.data, build_dir)
    )
    step = json.loads(run.summary.read_text())["final"]["iterations"]
    items = items_of(evaluation, evaluate, config.data.dataset, vocabulary, step)
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
            "expected_calibration_error": expected_calibration_error(evaluation.calibration),
        },
    }
    _write(run, scheme, to_csv(items), summary)
    return summary


def table(run: RunDir, summaries: list[dict[str, Any]]) -> str:
    """Return a table of the training result and the new results, labelled by their weights."""
    trained = json.loads(run.summary.read_text())["final"]
    rows = [
        ("weights", "val_loss", "delta", "accuracy", "stored_MB"),
        _row("trained", trained, trained),
    ]
    for summary in summaries:
        rounded = summary["quantization"]
        label, stored = rounded["quantization_scheme"], f"{rounded['stored_bytes'] / 1e6:.3f}"
        rows.append((*_row(label, summary["final"], trained)[:-1], stored))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _row(label: str, final: dict[str, Any], trained: dict[str, Any]) -> tuple[str, ...]:
    loss, accuracy = final["val_loss"], final["token_accuracy"]
    return label, f"{loss:.6f}", f"{loss - trained['val_loss']:+.6f}", f"{accuracy:.4f}", ""


def _require_data_of(run: RunDir, digest: str) -> None:
    recorded = json.loads(run.manifest.read_text())["data"]["digest"]
    if digest != recorded:
        what = f"data differs from the data of the run (expected {recorded}, got {digest})"
        advice = "restore the data of the run"
        raise DataError(Problem(what, str(run.manifest), advice, code="data.mismatch"))


def _write(run: RunDir, scheme: str, rows: str, summary: dict[str, Any]) -> None:
    """Write rows and summary (the summary last), and log where they are.

    With original weights, also log whether the rows are identical to those of the run.
    """
    folder = run.evaluation(scheme)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / run.per_query.name, rows)
    write_json(folder / run.summary.name, summary)
    say("EVAL", f"{folder}   val loss {summary['final']['val_loss']:.4f}")
    if scheme == "none":
        same = rows.encode() == run.per_query.read_bytes()
        text = (
            "reproduced exactly" if same else "not reproduced exactly: different machine or torch?"
        )
        say("EVAL" if same else "WARN", f"{run.per_query} {text}")
