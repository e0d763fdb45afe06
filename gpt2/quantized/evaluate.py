"""Re-evaluation of a finished run, with original weights or after post-training quantization.

Quantized and dequantized are the matrices of linear layers in the blocks; products have the precision
of the run. Results have a folder of their own.
"""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt2.config import Config
from gpt2.data import tokenizer
from gpt2.data.dataset import open_dataset
from gpt2.evaluate import Evaluator
from gpt2.lora import CodedMatrix
from gpt2.model import GPT
from gpt2.quantized.codes import decode, encode
from gpt2.quantized.options import FOUR_BIT_SCHEMES, PACKAGE, quantization_fields
from gpt2.training.per_query import items_of
from gpt2.weights.trained import load_run, machine_here
from lib.console import log
from lib.env.machine import set_up
from lib.env.ranks import ProcessRank
from lib.errors import ConfigError, DataError, Problem
from lib.files import sha256_file, write_atomic, write_json
from lib.json_files import read_record
from lib.report.render import text_lines
from lib.runs.documents import evaluation_metrics, expected_calibration_error, to_csv
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

_FP32_BYTES = 4


@torch.no_grad()
def quantize(model: GPT, scheme: str) -> dict[str, Any]:
    """Quantize the weights of ``model`` in place; return scheme, counts and stored bytes."""
    rounded = stored = 0
    if scheme != "none":
        for module in model.h.modules():
            if isinstance(module, nn.Linear):
                codes, scales = encode(module.weight, scheme)
                module.weight.copy_(decode(codes, scales, scheme, *module.weight.shape))
                rounded += module.weight.numel()
                stored += codes.nbytes + scales.nbytes
    # Of a base that was stored as codes in training.
    coded = [m for m in model.modules() if isinstance(m, CodedMatrix)]
    if coded:
        scheme, rounded = coded[0].scheme, sum(m.elements for m in coded)
        stored = sum(p.nbytes for m in coded for p in m.parameters())
    rest = model.num_params() - rounded
    return {
        **quantization_fields(scheme),
        "bnb_version": version(PACKAGE) if scheme in FOUR_BIT_SCHEMES else None,
        "quantized_parameters": rounded,
        "full_precision_parameters": rest,
        "stored_bytes": stored + rest * _FP32_BYTES,
    }


SCHEMA_VERSION = 1


def evaluate_run(run: RunDir, config: Config, build_dir: Path, scheme: str) -> dict[str, Any]:
    """Evaluate the finished ``run`` on its validation documents; write and return the summary.

    Raises PreflightError if the weights are missing or damaged, DataError if the data differs from
    the data of the run.
    """
    dataset = open_dataset(config.data, build_dir)
    recorded = RunRecord(run).manifest.value(str, "data", "digest")
    if dataset.digest != recorded:
        what = f"data differs from the data of the run (expected {recorded}, got {dataset.digest})"
        advice = "restore the data of the run"
        raise DataError(Problem(what, str(run.manifest), advice, code="data.mismatch"))
    config = replace(config, machine=machine_here(config.machine))
    device = set_up(config.machine, ProcessRank())
    base = next((part.base for part in config.model.adapters), "fp32")
    if base != "fp32" and scheme != "none":
        what = f"{scheme} of a run with LORA_BASE={base} (expected none)"
        advice = "type: make evaluate RUN=NAME"
        raise ConfigError(Problem(what, "QUANT", advice, code="config.conflict"))
    model = load_run(run.path).to(device)
    rounded = quantize(model, scheme)
    evaluate = Evaluator(config, dataset.val, device)
    evaluation = evaluate(model)
    assert evaluation is not None
    vocabulary = tokenizer.load_tokenizer(config.data.tokenizer, config.data.folder(build_dir))
    step = RunRecord(run).final.iterations
    items = items_of(evaluation, evaluate, config.data.dataset, vocabulary, step)
    summary = {
        "schema_version": SCHEMA_VERSION,
        "run": run.path.name,
        "hash8": config.hash8,
        "seed": config.seed,
        "weights_sha256": sha256_file(run.weights),
        "data_digest": dataset.digest,
        "device": str(device),
        "quantization": rounded,
        "final": {
            **evaluation_metrics(items),
            "expected_calibration_error": expected_calibration_error(evaluation.calibration),
        },
    }
    _write(run, scheme, to_csv(items), summary)
    return summary


def table(run: RunDir, summaries: list[dict[str, Any]]) -> str:
    """Return a table of the training result and the new results, labelled by their weights."""
    trained = RunRecord(run).summary.value(dict, "final")
    results = [("trained", trained, "")]
    for summary in summaries:
        rounded = summary["quantization"]
        stored = f"{rounded['stored_bytes'] / 1e6:.3f}"
        results.append((rounded["quantization_scheme"], summary["final"], stored))
    rows = [("weights", "val_loss", "delta", "accuracy", "stored_MB")]
    for label, final, stored in results:
        loss, accuracy = final["val_loss"], final["token_accuracy"]
        delta = f"{loss - trained['val_loss']:+z.6f}"
        rows.append((label, f"{loss:.6f}", delta, f"{accuracy:.4f}", stored))
    return "".join(f"{line}\n" for line in text_lines(rows))


def _write(run: RunDir, scheme: str, rows: str, summary: dict[str, Any]) -> None:
    """Write rows and summary, the summary last; of original weights, log whether the rows are the same."""
    folder = run.evaluation(scheme)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / run.per_query.name, rows)
    write_json(folder / run.summary.name, summary)
    log("EVAL", f"{folder}   val loss {summary['final']['val_loss']:.4f}")
    if scheme == "none":
        same = rows.encode() == read_record(run.per_query, "rows")
        text = (
            "reproduced exactly" if same else "not reproduced exactly: different machine or torch?"
        )
        log("EVAL" if same else "WARN", f"{run.per_query} {text}")
