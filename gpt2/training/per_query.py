"""Per-document rows of ``per_query.csv``: facts about each evaluation document, and its losses."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpt2.data.dataset import TokenSplit
from gpt2.data.evaluation_windows import EvaluationWindow
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
    """Return the rows of ``per_query.csv`` after ``step`` optimizer steps."""
    measured = {loss.document: loss for loss in evaluation.documents}
    facts = item_facts(evaluate.windows, evaluate.split, evaluate.batch_size, source, words)
    return [
        DocumentResult(**vars(fact), n_correct=loss.n_correct, nll_sum=loss.nll_sum, eval_step=step)
        for fact, loss in ((facts[number], measured[number]) for number in facts)
    ]


def item_facts(
    windows: Sequence[EvaluationWindow],
    split: TokenSplit,
    batch_size: int,
    source: str,
    words: Tokenizer,
) -> dict[int, DocumentInfo]:
    """Return position → facts of each document in ``windows``, in the order of per_query.csv.

    The order is that of the names, and of the positions if names are equal.
    """
    indices_by_document: dict[int, list[int]] = {}
    for i, window in enumerate(windows):
        indices_by_document.setdefault(window.document, []).append(i)
    lengths_V = _token_lengths(words)
    facts = {}
    for number, indices in indices_by_document.items():
        parts = sorted((windows[i] for i in indices), key=lambda window: window.offset)
        tokens = np.concatenate([split.window(w.offset + 1, w.predicted) for w in parts])
        batch_index, row_in_batch = divmod(indices[0], batch_size)
        document = split.documents[number] if split.documents else None
        facts[number] = DocumentInfo(
            item_id=document.id if document else f"window-{number:06d}",
            source=source,
            doc_sha256=document.digest if document else "",
            tokens_sha256=hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest(),
            split=split.name,
            n_tokens=len(tokens),
            n_bytes=int(lengths_V[tokens].sum()),
            batch_index=batch_index,
            row_in_batch=row_in_batch,
        )
    return {n: facts[n] for n in sorted(facts, key=lambda n: (facts[n].item_id, n))}


def _token_lengths(words: Tokenizer) -> np.ndarray:
    """Return the number of text bytes per token id [V]; 0 for the end-of-text token."""
    lengths_V = np.array([len(words.token_bytes(i)) for i in range(words.vocab_size)])
    lengths_V[words.end_of_text] = 0
    return lengths_V
