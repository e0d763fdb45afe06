"""Rows of documents that have no text to digest, or the name of another one."""

import hashlib

import numpy as np

from gpt2.data.dataset import TokenSplit
from gpt2.data.evaluation_windows import evaluation_windows
from gpt2.data.tokenizer import ByteTokenizer
from gpt2.training.per_query import item_facts
from lib.files import canonical_json

TEXTS = ["naïve and long enough for three windows.", "x", "two words"]
# A file of the user may choose equal names: rows of one name are in the order of the index.
NAMES = ["d1", "d1", "d0"]


def test_every_document_has_a_row_with_its_facts(tmp_path):
    words, tokens, lines = ByteTokenizer(), [], []
    for name, text in zip(NAMES, TEXTS, strict=True):
        ids = [*words.encode(text), words.end_of_text]
        digest = hashlib.sha256(text.encode()).hexdigest()
        line = {"id": name, "offset": len(tokens), "length": len(ids), "sha256": digest}
        lines.append(canonical_json(line) + "\n")
        tokens += ids
    files = [tmp_path / "val.bin"]
    np.array(tokens, "<u2").tofile(files[0])
    (tmp_path / "val.jsonl").write_text("".join(lines))

    split = TokenSplit("val", files, tmp_path / "val.jsonl")
    found = item_facts(evaluation_windows(split, 16, 1000), split, 2, "texts", words)
    assert [(n, item.item_id) for n, item in found.items()] == [(2, "d0"), (0, "d1"), (1, "d1")]
    for number, item in found.items():
        assert item.doc_sha256 == hashlib.sha256(TEXTS[number].encode()).hexdigest()
        assert item.n_tokens == len(TEXTS[number].encode())

    bare = TokenSplit("val", files, None)
    found = item_facts(evaluation_windows(bare, 16, 1000), bare, 4, "custom", words)
    assert {item.doc_sha256 for item in found.values()} == {""}
    assert found[0].item_id == "window-000000"
    assert sum(item.n_tokens for item in found.values()) == len(tokens) - 1
