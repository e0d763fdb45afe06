"""Per-document rows of ``per_query.csv``: facts about each evaluation document, and its losses."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpt2.data.store import EvaluationWindow, TokenSplit
from gpt2.data.tokenizer import Tokenizer
from lib.runs.documents import DocumentInfo, DocumentResult

if TYPE_CHECKING:
    # An audit reads the facts of documents without torch.
    from gpt2.evaluate import EvaluationResult, Evaluator


def items_of(
    evaluation: "EvaluationResult",
    evaluate: "Evaluator",
    source: str,
    words: Tokenizer,
    step: int,
) -> list[DocumentResult]:
    """Return the rows of ``per_query.csv`` after ``step`` optimizer steps, sorted by document."""
    measured = {document.item_id: document for document in evaluation.documents}
    facts = item_facts(evaluate.windows, evaluate.split, evaluate.batch_size, source, words)
    return [
        DocumentResult(
            **vars(document),
            n_correct=measured[document.item_id].n_correct,
            nll_sum=measured[document.item_id].nll_sum,
            eval_step=step,
        )
        for document in facts
    ]


def item_facts(
    windows: Sequence[EvaluationWindow],
    split: TokenSplit,
    batch_size: int,
    source: str,
    words: Tokenizer,
) -> list[DocumentInfo]:
    """Return the facts of each document in ``windows``, sorted by document name."""
    indices_by_document: dict[str, list[int]] = {}
    for i, window in enumerate(windows):
        indices_by_document.setdefault(window.document, []).append(i)
    digests = {document.id: document.digest for document in split.documents or []}
    lengths_V = _token_lengths(words)
    facts = []
    for name, indices in sorted(indices_by_document.items()):
        parts = sorted((windows[i] for i in indices), key=lambda window: window.offset)
        tokens = np.concatenate([split.window(w.offset + 1, w.predicted) for w in parts])
        batch_index, row_in_batch = divmod(indices[0], batch_size)
        facts.append(
            DocumentInfo(
                item_id=name,
                source=source,
                doc_sha256=digests.get(name, ""),
                tokens_sha256=hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest(),
                split=split.name,
                n_tokens=len(tokens),
                n_bytes=int(lengths_V[tokens].sum()),
                batch_index=batch_index,
                row_in_batch=row_in_batch,
            )
        )
    return facts


def _token_lengths(words: Tokenizer) -> np.ndarray:
    """Return the number of text bytes per token id [V]; 0 for the end-of-text token."""
    lengths_V = np.array([len(words.token_bytes(i)) for i in range(words.vocab_size)])
    lengths_V[words.end_of_text] = 0
    return lengths_V
