"""Per-document facts of the evaluation, compared with the texts."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from gpt2.data.dataset import TokenSplit
from gpt2.data.evaluation_windows import evaluation_windows
from gpt2.data.tokenizer import ByteTokenizer
from gpt2.training.per_query import item_facts
from lib.files import canonical_json

TEXTS = ["naïve and long enough for three windows.", "x", "two words"]
WORDS = ByteTokenizer()
END = np.array([WORDS.end_of_text], dtype="<u2")


@pytest.fixture
def split(tmp_path) -> TokenSplit:
    """Return the texts as a validation split."""
    tokens, lines = [], []
    for i, text in enumerate(TEXTS):
        ids = np.concatenate([WORDS.encode(text), END])
        digest = hashlib.sha256(text.encode()).hexdigest()
        offset = sum(map(len, tokens))
        line = {"id": f"d{i}", "offset": offset, "length": len(ids), "sha256": digest}
        tokens.append(ids)
        lines.append(canonical_json(line) + "\n")
    np.concatenate(tokens).astype("<u2").tofile(tmp_path / "val.bin")
    (tmp_path / "val.jsonl").write_text("".join(lines))
    return TokenSplit("val", [tmp_path / "val.bin"], tmp_path / "val.jsonl")


def test_token_files_have_no_texts_to_digest(split, tmp_path):
    bare = TokenSplit("val", [tmp_path / "val.bin"], None)
    found = item_facts(evaluation_windows(bare, 16, 1000), bare, 4, "custom", WORDS)
    assert {item.doc_sha256 for item in found.values()} == {""}
    assert found[0].item_id == "window-000000"
    assert sum(item.n_tokens for item in found.values()) == bare.n_tokens - 1


def test_documents_of_one_name_have_a_row_each(split):
    """A file of the user may choose equal names: rows of one name are in the order of the index."""
    split.documents[0], split.documents[2] = (
        replace(split.documents[0], id="d1"),
        replace(split.documents[2], id="d0"),
    )
    found = item_facts(evaluation_windows(split, 16, 1000), split, 2, "texts", WORDS)
    assert [(n, item.item_id) for n, item in found.items()] == [(2, "d0"), (0, "d1"), (1, "d1")]
    for number, item in found.items():
        assert item.doc_sha256 == hashlib.sha256(TEXTS[number].encode()).hexdigest()
        assert item.n_tokens == len(TEXTS[number].encode())
