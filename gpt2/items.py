"""What ``per_query.csv`` says of each evaluation document before any model is asked."""

import hashlib
from collections.abc import Sequence

import numpy as np

from gpt2.data.evaluation import EvalWindow
from gpt2.data.store import Split
from gpt2.data.tokenizer import Tokenizer
from gpt2.evaluate import Evaluation, Evaluator
from lib.repro.per_query import Item, ItemFacts


def items_of(
    evaluation: Evaluation, evaluate: Evaluator, source: str, words: Tokenizer, step: int
) -> list[Item]:
    """The rows of ``per_query.csv``, in the order of their names, after ``step`` optimizer steps."""
    measured = {document.item_id: document for document in evaluation.documents}
    facts = item_facts(evaluate.windows, evaluate.split, evaluate.batch_size, source, words)
    return [
        Item(
            **vars(known),
            n_correct=measured[known.item_id].n_correct,
            nll_sum=measured[known.item_id].nll_sum,
            eval_step=step,
        )
        for known in facts
    ]


def item_facts(
    windows: Sequence[EvalWindow], split: Split, batch_size: int, source: str, words: Tokenizer
) -> list[ItemFacts]:
    """The documents of an evaluation of ``windows``, in the order of their names."""
    places: dict[str, list[int]] = {}
    for place, window in enumerate(windows):
        places.setdefault(window.document, []).append(place)
    digests = {document.id: document.digest for document in split.documents or []}
    lengths_V = _token_lengths(words)
    found = []
    for name, numbers in sorted(places.items()):
        cut = sorted((windows[i] for i in numbers), key=lambda window: window.offset)
        tokens = np.concatenate([split.window(w.offset + 1, w.predicted) for w in cut])
        batch_index, row_in_batch = divmod(numbers[0], batch_size)
        found.append(
            ItemFacts(
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
    return found


def _token_lengths(words: Tokenizer) -> np.ndarray:
    """Bytes of text of each id [V]; the end of a text stands for none."""
    lengths_V = np.array([len(words.token_bytes(i)) for i in range(words.vocab_size)])
    lengths_V[words.end_of_text] = 0
    return lengths_V
