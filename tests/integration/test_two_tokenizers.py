"""A study of two tokenizers is trained, and judged in bits per byte of the same text."""

import csv
import json
import math
import statistics
from pathlib import Path

import pytest

STUDY = """\
name = "tokens"
unit = "bits-per-byte"
seeds = "1-2"

[[step]]
name = "bytes"

[[step]]
name = "pieces"
title = "GPT-2's byte pair encoding"
set = { TOKENIZER_GPT2 = true }
params = [0, 999]
"""


def bits_per_byte(folder: Path) -> dict[str, float]:
    """Return the loss of each run from its rows, by the name of its directory."""
    losses = {}
    for file in folder.glob("*/per_query.csv"):
        rows = list(csv.DictReader(file.read_text().splitlines()))
        nats = math.fsum(float(row["nll_sum"]) for row in rows)
        losses[file.parent.name] = nats / sum(int(row["n_bytes"]) for row in rows) / math.log(2)
    return losses


def texts(folder: Path, slug: str) -> list[tuple[str, str]]:
    file, *_ = sorted(folder.glob(f"{slug}-s*/per_query.csv"))
    rows = csv.DictReader(file.read_text().splitlines())
    return [(row["doc_sha256"], row["n_bytes"]) for row in rows]


@pytest.mark.slow
def test_two_tokenizers_are_trained_and_judged_in_bits_per_byte(build, tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    folder = build(
        ABLATION_STUDY_OWN=True, EVAL_DOCUMENTS=2, VERDICT_AA=False, MAX_ITERS=2, SAMPLE_TOKENS=0
    )
    code, table, said = folder.command("all")
    assert code == 0, said
    results = folder.path / "results/tokens"
    # Every byte of the same two documents, the first ones included.
    assert texts(results, "bytes") == texts(results, "pieces") and len(texts(results, "bytes")) == 2
    sizes = {len(path.read_bytes()) for path in (folder.path / "text").iterdir()}
    assert {int(size) for _, size in texts(results, "bytes")} <= sizes
    losses = bits_per_byte(results)
    assert len(losses) == 4
    code, text, said = folder.command("report", JSON="1")
    assert code == 0, said
    document = json.loads(text)
    (verdict,) = document["verdicts"]
    assert (verdict["n"], verdict["excluded"]) == (2, [])
    means = {slug: [] for slug in ("bytes", "pieces")}
    for name, loss in sorted(losses.items()):
        means[name.partition("-")[0]].append(loss)
    differences = [p - b for p, b in zip(means["pieces"], means["bytes"], strict=True)]
    assert verdict["differences"] == pytest.approx(differences, abs=1e-12)
    rows = {row["slug"]: row for row in document["rows"]}
    for slug, values in means.items():
        assert rows[slug]["val_loss"] == pytest.approx(statistics.fmean(values), abs=1e-12)
        assert rows[slug]["perplexity"] is None
    assert "bits per byte" in table and "nats" not in table
    code, text, said = folder.command("verify-results", JSON="1")
    rows = {row["check"]: row["verdict"] for row in json.loads(text)["rows"]}
    names = ("evaluation", "data and preprocessing", "tracker")
    assert "FAIL" not in [rows[name] for name in names], text
    code, text, said = folder.command("audit", "--runs", "*")
    assert code == 0, text + said
