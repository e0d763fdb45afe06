"""Every number in the result files of a run: computed again here, or by the test that is named.

A number that is new in a file fails until one of both is true. The columns of tables and page are in
``tests/lib/report/test_columns.py``, the series of trackers in ``test_tracking.py``.
"""

import csv
import hashlib
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch

from gpt2.data.evaluation_windows import evaluation_windows
from gpt2.model import GPT
from gpt2.training.loop import optimizer_step
from gpt2.training.metrics import peak_flops
from gpt2.training.state import TrainingSession
from lib.project import ROOT
from lib.runs.documents import expected_calibration_error
from lib.tracking.reader import ReadCursor, RecordReader
from tests.gpt2.training.conftest import ITERATIONS, Trained
from tests.json_rows import read_rows

END_OF_TEXT = 256
# Of a step, and sequences of a batch.
TOKENS = 4 * 16
BATCH = 2
HEARTBEAT = {
    *("ts", "iso", "pid", "rank", "step", "msg", "loss", "lr", "toks_per_s", "mfu", "dt_fetch_s"),
    *("mem_alloc_mib", "mem_reserved_mib", "grad_norm", "eta_s", "fallbacks"),
}
ELSEWHERE = {
    "summary final data_order_digest": "tests/gpt2/training/test_ranks.py",
    "metrics statistics values attention/entropy": "tests/gpt2/test_mechanism_statistics.py",
    "timing spam_clipped_fraction": "tests/lib/optim/test_optimizers.py",
    "timing spam_resets": "tests/lib/optim/test_optimizers.py",
    "timing spam_spikes": "tests/lib/optim/test_optimizers.py",
}


@dataclass(frozen=True)
class Prediction:
    token: int
    nats: float
    likeliest: int
    probability: float


@pytest.fixture(scope="module")
def measured() -> list[float]:
    """The loss of each step of ``done``."""
    return []


@pytest.fixture(scope="module")
def done(configure, lasting, measured) -> Trained:
    """A run that evaluates every token of the held-out documents."""

    def noted(session: TrainingSession, *rest: Any) -> Any:
        found = optimizer_step(session, *rest)
        measured.append(found.loss.item())
        return found

    config = configure(
        EVAL_TOKENS=100_000, STATISTICS_INTERVAL=5, DROPOUT="0.0", PEAK_TFLOPS="0.25"
    )
    with mock.patch("gpt2.training.loop.optimizer_step", noted):
        return lasting()(config)


@pytest.fixture(scope="module")
def weights(done) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(done.files.weights)


@pytest.fixture(scope="module")
def documents(done) -> list[dict[str, str]]:
    with open(done.files.per_query, newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def predictions(configure, documents, weights, build_dir) -> list[list[Prediction]]:
    """The predictions of each document by the model in the file, window by window."""
    model = GPT(configure().model).eval()
    model.load_state_dict(weights, strict=False)
    found = []
    for row in documents:
        text = (build_dir / "texts" / row["item_id"]).read_bytes()
        tokens = torch.tensor([*text, END_OF_TEXT])
        of_document = []
        for window in (tokens[start : start + 17] for start in range(0, len(text), 16)):
            with torch.no_grad():
                logs = model(window[None, :-1])[0].double().log_softmax(-1)
            for log, token in zip(logs, window[1:].tolist(), strict=True):
                best = int(log.argmax())
                of_document.append(Prediction(token, -float(log[token]), best, math.exp(log[best])))
        found.append(of_document)
    return found


def test_documents(documents, predictions, build_dir):
    assert len(documents) > 2
    for row, predicted in zip(documents, predictions, strict=True):
        text = (build_dir / "texts" / row["item_id"]).read_bytes()
        tokens = b"".join(each.token.to_bytes(2, "little") for each in predicted)
        expected = {
            "source": "custom",
            "doc_sha256": hashlib.sha256(text).hexdigest(),
            "tokens_sha256": hashlib.sha256(tokens).hexdigest(),
            "split": "val",
            "n_tokens": str(len(text)),
            "n_bytes": str(len(text) - 1),
            "n_correct": str(sum(each.token == each.likeliest for each in predicted)),
            "eval_step": str(ITERATIONS),
        }
        nats = math.fsum(each.nats for each in predicted)
        numbers = {
            "nll_sum": nats,
            "nll_mean": nats / len(text),
            "bits_per_byte": nats / math.log(2) / (len(text) - 1),
        }
        assert {name: row[name] for name in expected} == expected
        assert {name: float(row[name]) for name in numbers} == pytest.approx(numbers, rel=1e-5)
        assert row.keys() == expected.keys() | numbers.keys() | {
            *("item_id", "batch_index", "row_in_batch")
        }


def test_places_in_batches(documents):
    """Windows are read in the order of the digests of document and first token, two in a batch."""
    order = sorted(
        (hashlib.sha256(f"{row['doc_sha256']}:{start}".encode()).digest(), row["item_id"])
        for row in documents
        for start in range(0, int(row["n_bytes"]) + 1, 16)
    )
    first = {name: place for place, (_, name) in reversed(list(enumerate(order)))}
    places = {
        row["item_id"]: (int(row["batch_index"]), int(row["row_in_batch"])) for row in documents
    }
    assert places == {name: divmod(place, BATCH) for name, place in first.items()}


def test_summary(done, predictions, weights, documents, build_dir):
    everything = [each for predicted in predictions for each in predicted]
    n, nats = len(everything), math.fsum(each.nats for each in everything)
    matrices = {k: w for k, w in weights.items() if k.startswith("h.") and w.ndim == 2}
    zeros = {name: int((w == 0).sum()) for name, w in matrices.items()}
    held_out = {row["item_id"] for row in documents}
    trained = [
        token
        for path in (build_dir / "texts").iterdir()
        if path.name not in held_out
        for token in [*path.read_bytes(), END_OF_TEXT]
    ]
    shares = [count / len(trained) for count in Counter(trained).values()]
    bins = [
        [each for each in everything if math.ceil(each.probability * 15) == m + 1]
        for m in range(15)
    ]
    hits = [sum(each.token == each.likeliest for each in found) for found in bins]
    confidences = [math.fsum(each.probability for each in found) for found in bins]
    expected = {
        **{f"calibration confidence_sum {m}": total for m, total in enumerate(confidences)},
        **{f"calibration n_correct {m}": hit for m, hit in enumerate(hits)},
        **{f"calibration n_tokens {m}": len(found) for m, found in enumerate(bins)},
        "final bits_per_byte": nats / math.log(2) / (n - len(predictions)),
        "final budget_stretch": 1.0,
        "final eval_documents": len(predictions),
        "final eval_tokens": n,
        "final expected_calibration_error": sum(
            abs(hit - confidence) / n for hit, confidence in zip(hits, confidences, strict=True)
        ),
        "final iterations": ITERATIONS,
        "final parameters": sum(w.numel() for w in weights.values()),
        **{f"final prunable_weights {name}": w.numel() for name, w in matrices.items()},
        "final sparsity": sum(zeros.values()) / sum(w.numel() for w in matrices.values()),
        **{
            f"final sparsity_by_layer {name}": zeros[name] / w.numel()
            for name, w in matrices.items()
        },
        "final token_accuracy": sum(hits) / n,
        "final tokens": ITERATIONS * TOKENS,
        # Of the last tenth of the iterations.
        "final train_loss": done.rows("train")[-1]["loss"],
        "final unigram_entropy": -sum(share * math.log(share) for share in shares),
        "final val_loss": nats / n,
        "final val_perplexity": math.exp(nats / n),
        "schema_version": 2,
        "seed": 1,
    }
    found = {
        name: value for name, value in numbers(done.summary()) if not name.startswith("timing")
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_calibration_error_agrees_with_a_plain_loop(session):
    """Over |acc - conf| of 15 bins; sure answers, some of them wrong, fill the upper bins too."""
    opened = session()
    with torch.no_grad():
        opened.model.wte.weight.mul_(60)
    calibration = opened.evaluate(opened.model).calibration
    split, model = opened.dataset.val, opened.model.eval()
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for window in evaluation_windows(split, 16, opened.config.data.eval_tokens):
        tokens = torch.from_numpy(split.window(window.offset, window.length).astype("int64"))
        with torch.no_grad():
            probabilities = torch.softmax(model(tokens[None, :-1])[0].double(), -1)
        for p_V, right in zip(probabilities, tokens[1:], strict=True):
            place = next(m for m in range(15) if p_V.max() <= (m + 1) / 15 or m == 14)
            bins[place].append((float(p_V.max()), bool(p_V.argmax() == right)))
    assert len(bins) > 5
    n = sum(map(len, bins.values()))
    gaps = [abs(sum(hit - p for p, hit in found)) / n for found in bins.values()]
    assert expected_calibration_error(calibration) == pytest.approx(sum(gaps), rel=1e-4)
    assert calibration["n_tokens"] == [len(bins[m]) for m in range(15)]
    assert calibration["n_correct"] == [sum(hit for _, hit in bins[m]) for m in range(15)]


def test_speed(done, configure):
    """The seconds of timing.jsonl are measured; what is computed from them agrees with them."""
    rows = read_rows(done.files.timing)
    # Of a token forward and backward: two dense blocks, half of the pairs, and the embedding.
    block = 2 * 12 * 16 * 16 + 4 * 16 * (16 + 1) / 2
    flops = 3 * (2 * block + 2 * 16 * configure().model.shape.padded_vocab_size)
    for before, row in pairwise([{"iteration": 0, "train_seconds": 0.0}, *rows]):
        steps = row["iteration"] - before["iteration"]
        speed = steps * TOKENS / (row["train_seconds"] - before["train_seconds"])
        rest = ITERATIONS - row["iteration"]
        expected = {
            "iterations": ITERATIONS,
            "tokens_per_second": speed,
            "mfu": flops * speed / 0.25e12,
            "eta_seconds": row["train_seconds"] / row["iteration"] * rest,
            "spam_learning_rate": done.rows("train")[row["iteration"] - 1]["lr"],
        }
        measured = {"iteration", "train_seconds", "written_at"}
        elsewhere = {name.split()[1] for name in ELSEWHERE if name.startswith("timing")}
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert row.keys() == expected.keys() | measured | elsewhere
    assert [row["iteration"] for row in rows] == [3, 6, 9, 12]
    assert "% MFU)" in done.files.logs.read_text()
    told = dict(RecordReader(done.files, ReadCursor()).new())
    assert [told[row["iteration"]]["mfu"] for row in rows] == [row["mfu"] for row in rows]
    timing = dict(numbers(done.summary()["timing"]))
    after = ITERATIONS - 3
    step = (timing["train_seconds"] - rows[0]["train_seconds"]) / after
    expected = {
        "mean_step_seconds": step,
        "tokens_per_second": TOKENS / step,
        "warmup_iterations": 3,
        "warmup_seconds": rows[0]["train_seconds"],
    }
    assert {name: timing.pop(name) for name in expected} == pytest.approx(expected)
    assert timing["total_seconds"] > timing["train_seconds"] >= rows[-1]["train_seconds"]
    assert timing.keys() == {"total_seconds", "train_seconds"}


def test_rows_of_metrics(done, session):
    for i, row in enumerate(done.rows("train")):
        # The warm-up ends at a sixth of the budget.
        cosine = (1 + math.cos(math.pi * (i - 2) / 10)) / 2
        expected = {
            "iteration": i + 1,
            "lr": 1e-2 * (i + 1) / 2 if i < 2 else 1e-3 + (1e-2 - 1e-3) * cosine,
            "progress": (i + 1) / ITERATIONS,
            "tokens": (i + 1) * TOKENS,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert row.keys() == expected.keys() | {"kind", "loss", "grad_norm"}
    opened = session(DROPOUT="0.0")
    first, losses = done.rows("train")[0], []
    for x_BT, y_BT in next(opened.batches()):
        logits = opened.model(x_BT)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y_BT.flatten()))
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(opened.model.parameters()))
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(
        math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients)), rel=1e-5
    )


def test_losses_are_exact(done, measured):
    assert [row["loss"] for row in done.rows("train")] == measured


def test_evaluations_and_statistics_in_metrics(done):
    final = done.summary()["final"]
    shared = {name: final[name] for name in ("sparsity", "token_accuracy", "val_loss", "tokens")}
    assert done.rows("eval")[-1] == {"kind": "eval", "iteration": ITERATIONS, **shared}
    others = [row for row in read_rows(done.files.metrics) if row["kind"] != "train"]
    assert [(row["kind"], row["iteration"]) for row in others] == [
        (kind, iteration) for iteration in (5, 10, 12) for kind in ("statistics", "eval")
    ]
    assert {row["tokens"] / row["iteration"] for row in others} == {TOKENS}


def test_heartbeats(done):
    beats = read_rows(done.files.heartbeat(0))
    trained = [beat for beat in beats if beat["msg"] == "train"]
    assert len(trained) == 4
    for beat in trained:
        assert beat.keys() == HEARTBEAT
        assert None not in beat.values()
        # MiB: a process with torch has a few hundred, which excludes GiB and bytes.
        assert 50 < beat["mem_alloc_mib"] < 50_000
    assert [beat["msg"] for beat in beats if beat["step"] == 12][-2:] == ["statistics", "eval"]


def test_without_a_known_peak_there_is_no_mfu(trained):
    assert {row["mfu"] for row in read_rows(trained.files.timing)} == {None}
    (line,) = [text for text in trained.files.logs.read_text().splitlines() if "MFU" in text]
    assert "fp32" in line and "PEAK_TFLOPS" in line


def test_the_peak_is_of_all_devices_of_a_run(session):
    opened = session()
    opened.device = torch.device("cuda")
    with (
        mock.patch("gpt2.training.metrics.device_name", return_value="NVIDIA A100-SXM4-80GB"),
        mock.patch.object(type(opened.group), "size", 4),
    ):
        assert peak_flops(opened) == 4 * 19.5e12


def test_the_tests_of_other_numbers_exist(done):
    (statistics,) = {json.dumps(sorted(row["values"])) for row in done.rows("statistics")}
    assert statistics == json.dumps(["attention/entropy"])
    for name, path in ELSEWHERE.items():
        assert name.split()[-1] in (ROOT / path).read_text(), (name, path)


def numbers(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the numbers in a JSON value, by their place."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return [each for name in value for each in numbers(value[name], f"{path} {name}".strip())]
    return (
        [(path, value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
    )
