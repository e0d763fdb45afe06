"""Resumable preparation of large data sets through checkpoints in the data set's folder.

A checkpoint records the size and SHA-256 of each file, and the position of the stream. Bytes
written after the checkpoint are truncated on resume, so the result is byte-identical wherever the
preparation was killed.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpt2.data.corpus import Document
from gpt2.data.hub import HubCorpus, Stream
from gpt2.data.shards import SplitWriter
from lib.console import say
from lib.files import write_json
from lib.units import clock, short

CHECKPOINT = "checkpoint.json"
# About ten seconds of work.
CHECKPOINT_TOKENS = 8 << 20
_PROGRESS_INTERVAL_SECONDS = 10.0


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the last checkpoint in ``folder``; None if there is none."""
    path = folder / CHECKPOINT
    return json.loads(path.read_bytes()) if path.exists() else None


def fill(
    corpus: HubCorpus,
    folder: Path,
    sides: Mapping[str, SplitWriter],
    add: Callable[[Document], object],
) -> str:
    """Call ``add`` with documents until the training split has ``corpus.tokens`` tokens.

    ``sides`` are the writers, restored to the last checkpoint of ``folder``. Documents are never
    cut, so the last one may exceed the budget. Returns the commit that was read. Raises DataError
    like ``Stream``.
    """
    state = read_checkpoint(folder)
    saved_tokens = _tokens(sides)
    try:
        stream = Stream(corpus, *(state["commit"], state["position"]) if state else ())
        progress = _Progress(corpus.tokens, sides["train"].tokens)
        # No document is fetched once the budget is reached.
        documents = iter(stream)
        while sides["train"].tokens < corpus.tokens:
            document = next(documents, None)
            if document is None:
                _warn_exhausted(corpus, sides["train"].tokens)
                break
            add(document)
            progress.show(sides["train"].tokens)
            if _tokens(sides) - saved_tokens >= CHECKPOINT_TOKENS:
                _checkpoint(folder, sides, stream)
                saved_tokens = _tokens(sides)
        return stream.commit
    except KeyboardInterrupt:
        say("STOP", f"{short(saved_tokens)} tokens saved; to resume, type: make data")
        raise


def _checkpoint(folder: Path, sides: Mapping[str, SplitWriter], stream: Stream) -> None:
    state = {
        "commit": stream.commit,
        "position": stream.position(),
        "sides": {name: side.checkpoint() for name, side in sides.items()},
    }
    write_json(folder / CHECKPOINT, state)


def _tokens(sides: Mapping[str, SplitWriter]) -> int:
    return sum(side.tokens for side in sides.values())


def _warn_exhausted(corpus: HubCorpus, tokens: int) -> None:
    what = f"{corpus.place} is exhausted (DATASET_TOKENS={corpus.tokens}, got {tokens})"
    say("WARN", what)


class _Progress:
    """Progress log: share of the token budget, tokens per second of this process, time left."""

    def __init__(self, budget: int, tokens: int) -> None:
        self._budget = budget
        self._first = tokens
        self._started = self._last = time.monotonic()
        if tokens:
            say("DATA", f"resuming at {tokens / budget:.0%} of {short(budget)} training tokens")

    def show(self, tokens: int) -> None:
        """Log the progress unless the last line is recent."""
        now = time.monotonic()
        if now - self._last < _PROGRESS_INTERVAL_SECONDS:
            return
        self._last = now
        rate = max(1, tokens - self._first) / (now - self._started)
        eta = clock(max(0, self._budget - tokens) / rate)
        share = f"{tokens / self._budget:4.0%} of {short(self._budget)} training tokens"
        say("DATA", f"{share}   {short(rate)} tok/s   eta {eta}")
