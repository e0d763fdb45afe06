"""A preparation of hours: checkpoints in its folder, from which it goes on to the same bytes.

A checkpoint says how long each file was and what its SHA-256 was, and where the stream stood. What
was written behind it is cut off, so neither a kill nor where checkpoints fell leaves a trace.
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
# Seconds between two lines of progress.
_PROGRESS_SECONDS = 10.0


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The last checkpoint in ``folder``; None where there is none."""
    path = folder / CHECKPOINT
    return json.loads(path.read_bytes()) if path.exists() else None


def fill(
    corpus: HubCorpus,
    folder: Path,
    sides: Mapping[str, SplitWriter],
    add: Callable[[Document], object],
) -> str:
    """Give ``add`` the documents until the training side holds ``corpus.tokens``; the commit.

    ``sides`` stand where the last checkpoint of ``folder`` left them. Every document is whole, so
    the last one may go beyond. Raises DataError as ``Stream`` does.
    """
    state = read_checkpoint(folder)
    kept = _tokens(sides)
    try:
        stream = Stream(corpus, *(state["commit"], state["position"]) if state else ())
        progress = _Progress(corpus.tokens, sides["train"].tokens)
        # No document is asked for once there are enough.
        documents = iter(stream)
        while sides["train"].tokens < corpus.tokens:
            document = next(documents, None)
            if document is None:
                _say_short(corpus, sides["train"].tokens)
                break
            add(document)
            progress.show(sides["train"].tokens)
            if _tokens(sides) - kept >= CHECKPOINT_TOKENS:
                _checkpoint(folder, sides, stream)
                kept = _tokens(sides)
        return stream.commit
    except KeyboardInterrupt:
        say("STOP", f"{short(kept)} tokens are kept; type make data, and it goes on from there")
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


def _say_short(corpus: HubCorpus, tokens: int) -> None:
    what = f"{corpus.place} ends after {tokens} training tokens; DATASET_TOKENS is {corpus.tokens}"
    say("WARN", what)


class _Progress:
    """A line now and then: share of the budget, tokens a second of this process, time left."""

    def __init__(self, budget: int, tokens: int) -> None:
        self._budget = budget
        self._first = tokens
        self._started = self._last = time.monotonic()
        if tokens:
            say("DATA", f"going on from {tokens / budget:.0%} of {short(budget)} training tokens")

    def show(self, tokens: int) -> None:
        """Say how far it is, if the last line is some time ago."""
        now = time.monotonic()
        if now - self._last < _PROGRESS_SECONDS:
            return
        self._last = now
        rate = max(1, tokens - self._first) / (now - self._started)
        left = clock(max(0, self._budget - tokens) / rate)
        share = f"{tokens / self._budget:4.0%} of {short(self._budget)} training tokens"
        say("DATA", f"{share}   {short(rate)} tok/s   eta {left}")
