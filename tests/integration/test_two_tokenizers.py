"""A study of two tokenizers is trained, and judged in bits per byte of the same text."""

import csv
import json
import math
import statistics

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


@pytest.mark.slow
def test_two_tokenizers_are_trained_and_judged_in_bits_per_byte(build, tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    small = {"EVAL_DOCUMENTS": 2, "SAMPLE_TOKENS": 0, "N_EMBD": 32}
    # Learns more than 0.1 nats.
    small |= {"MAX_ITERS": 12, "LEARNING_RATE": "3e-2", "MIN_LEARNING_RATE": "0"}
    folder = build(ABLATION_STUDY_OWN=True, VERDICT_AA=False, **small)
    code, table, said = folder.command("all")
    assert code == 0, said
    assert "bits per byte" in table and "nats" not in table
    losses, texts = {"bytes": [], "pieces": []}, []
    for file in sorted((folder.path / "results/tokens").glob("*/per_query.csv")):
        rows = list(csv.DictReader(file.read_text().splitlines()))
        texts.append([(row["doc_sha256"], int(row["n_bytes"])) for row in rows])
        nats = math.fsum(float(row["nll_sum"]) for row in rows)
        size = sum(int(row["n_bytes"]) for row in rows)
        losses[file.parent.name.partition("-")[0]].append(nats / size / math.log(2))
    # Every byte of the same two documents, the first ones included.
    assert texts == texts[:1] * 4 and len(texts[0]) == 2
    sizes = {len(path.read_bytes()) for path in (folder.path / "text").iterdir()}
    assert {size for _, size in texts[0]} <= sizes
    code, text, said = folder.command("report", JSON="1")
    assert code == 0, said
    document = json.loads(text)
    (verdict,) = document["verdicts"]
    assert (verdict["n"], verdict["excluded"]) == (2, [])
    differences = [p - b for b, p in zip(*losses.values(), strict=True)]
    assert verdict["differences"] == pytest.approx(differences, abs=1e-12)
    rows = {row["slug"]: row for row in document["rows"]}
    for slug, values in losses.items():
        assert rows[slug]["val_loss"] == pytest.approx(statistics.fmean(values), abs=1e-12)
        assert rows[slug]["perplexity"] is None
    code, text, said = folder.command("verify-results", JSON="1")
    found = {row["check"]: row["verdict"] for row in json.loads(text)["rows"]}
    names = ("evaluation", "data and preprocessing", "tracker")
    assert "FAIL" not in [found[name] for name in names], text
    code, text, said = folder.command("audit", "--runs", "*")
    assert code == 0, text + said
