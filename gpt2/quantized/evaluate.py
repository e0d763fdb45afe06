"""Re-evaluation of a finished run, with original weights or after post-training quantization.

Quantized and dequantized are the matrices of linear layers in the blocks; products have the precision
of the run. Results have a folder of their own. O outputs, I inputs of a linear layer.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.config import Config
from gpt2.data import tokenizer
from gpt2.data.dataset import data_folder, open_dataset
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.quantized.options import FOUR_BIT_SCHEMES, PACKAGE
from gpt2.training.per_query import items_of
from gpt2.weights.trained import load_run, machine_here
from lib.console import log
from lib.env.machine import set_up
from lib.env.ranks import ProcessRank
from lib.errors import DataError, Problem
from lib.files import sha256_file, write_atomic, write_json
from lib.json_files import read_record
from lib.report.render import text_lines
from lib.runs.documents import evaluation_metrics, expected_calibration_error, to_csv
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

_INT8_MAX = 127
# Elements that share a scale (Dettmers et al., "QLoRA", 2023, section 3).
_BLOCK = 64
_FP32_BYTES = 4

# Maps a weight [O, I] to its dequantized values and their storage size in bytes.
RoundTrip = Callable[[Tensor], tuple[Tensor, int]]


@torch.no_grad()
def quantize(model: GPT, scheme: str) -> dict[str, Any]:
    """Quantize the weights of ``model`` in place; return scheme, counts and stored bytes."""
    rounded = stored = 0
    if scheme != "none":
        round_trip = quantize_dequantize_int8 if scheme == "int8" else _four_bits(scheme)
        for module in model.h.modules():
            if isinstance(module, nn.Linear):
                values_OI, size = round_trip(module.weight)
                module.weight.copy_(values_OI)
                rounded, stored = rounded + values_OI.numel(), stored + size
    rest, four_bits = model.num_params() - rounded, scheme in FOUR_BIT_SCHEMES
    return {
        "quantization_enabled": scheme != "none",
        "quantization_scheme": f"4bit_{scheme}" if four_bits else scheme,
        "bnb_compute_dtype": "float32" if four_bits else None,
        "bnb_double_quant": False if four_bits else None,
        "bnb_version": version(PACKAGE) if four_bits else None,
        "quantized_parameters": rounded,
        "full_precision_parameters": rest,
        "stored_bytes": stored + rest * _FP32_BYTES,
    }


def quantize_dequantize_int8(weight_OI: Tensor) -> tuple[Tensor, int]:
    """Return int8 weights, dequantized, and their bytes; the scale of a row is its largest magnitude / 127."""
    scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / _INT8_MAX
    # A row of zeros has scale 0; avoid dividing by it.
    codes_OI = torch.round(weight_OI / torch.where(scale_O1 > 0, scale_O1, 1.0)).to(torch.int8)
    return codes_OI * scale_O1, codes_OI.numel() + scale_O1.numel() * _FP32_BYTES


def _four_bits(kind: str) -> RoundTrip:
    """Return the round trip for blocks of 64 elements: 4-bit codes times the largest magnitude."""
    # On a CPU it warns about a package with faster products, which are not used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Imported here: an extra.
    from bitsandbytes import functional

    def round_trip(weight_OI: Tensor) -> tuple[Tensor, int]:
        elements = weight_OI.numel()
        # One row per block: on a CPU, bitsandbytes 0.50 applies wrong scales if the row length is
        # not a multiple of the block size.
        blocks = F.pad(weight_OI.flatten(), (0, -elements % _BLOCK)).view(-1, _BLOCK)
        codes, state = functional.quantize_4bit(
            blocks, blocksize=_BLOCK, compress_statistics=False, quant_type=kind
        )
        values = functional.dequantize_4bit(codes, state).flatten()[:elements]
        size = codes.numel() + state.absmax.numel() * _FP32_BYTES
        return values.view_as(weight_OI), size

    return round_trip


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
    model = load_run(run.path).to(device)
    rounded = quantize(model, scheme)
    evaluate = Evaluator(config, dataset.val, device)
    evaluation = evaluate(model)
    assert evaluation is not None
    vocabulary = tokenizer.load_tokenizer(
        config.data.tokenizer, data_folder(config.data, build_dir)
    )
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
