"""Text generation from a finished run, streamed while it is generated."""

import argparse
import codecs
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpt2.arguments import number
from gpt2.data.tokenizer import Tokenizer
from gpt2.generate import generate
from gpt2.sampling import Sampling
from gpt2.trained import Trained
from lib.console import say
from lib.errors import ConfigError, Problem
from lib.repro.streams import stream_seed

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Order:
    """Text generation request: ``samples`` texts of up to ``tokens`` tokens after ``prompt``.

    Raises ConfigError if a count is below 1 or the prompt is not valid UTF-8.
    """

    prompt: str
    tokens: int
    seed: int
    samples: int
    sampling: Sampling

    def __post_init__(self) -> None:
        counts = {"TOKENS": self.tokens, "SAMPLES": self.samples}
        problems = [
            Problem(f"must be >= 1, got {count}", name, code="usage.out-of-range")
            for name, count in counts.items()
            if count < 1
        ]
        try:
            self.prompt.encode()
        except UnicodeEncodeError:
            problems.append(Problem("not valid UTF-8", "PROMPT", code="usage.invalid-encoding"))
        if problems:
            raise ConfigError(*problems)


def order(args: argparse.Namespace) -> Order:
    """Build an ``Order`` from the arguments of ``add_writing``.

    Raises ConfigError if an argument is invalid.
    """
    return Order(
        args.prompt,
        tokens=int(number(args, "tokens", int)),
        seed=int(number(args, "seed", int)),
        samples=int(number(args, "samples", int)),
        sampling=Sampling(
            number(args, "temperature", float),
            top_k=int(number(args, "top_k", int)),
            top_p=number(args, "top_p", float),
        ),
    )


@dataclass
class Text:
    """Generated text: the continuation of the prompt, its length in tokens and the stop reason."""

    seed: int
    text: str = ""
    tokens: int = 0
    # "length" or "end_of_text" once the text is complete
    end: str = "interrupted"


def write(trained: Trained, order: Order, show: Callable[[str], None]) -> list[Text]:
    """Generate all texts; ``show`` receives the prompt and each complete character at once.

    The randomness of a text depends on the seed and the index of the text, not on the number of
    texts. Raises ConfigError if the prompt is longer than the context.
    """
    prompt = prompt_ids(trained, order.prompt)
    texts = []
    for number in range(order.samples):
        if order.samples > 1:
            say("SAMPLE", f"{number + 1}/{order.samples}")
        seed = stream_seed(order.seed, f"generate/{number}")
        text = Text(seed)
        texts.append(text)
        tokens = generate(
            trained.model, torch.tensor(prompt), seed, trained.machine, order.sampling
        )
        started = time.perf_counter()
        try:
            show(order.prompt)
            for piece in _pieces(tokens, trained.tokenizer, order.tokens, text):
                text.text += piece
                show(piece)
        finally:
            # Also reached if Ctrl-C interrupts generation in the middle of a line.
            show("\n")
            rate = text.tokens / (time.perf_counter() - started)
            say("DONE", f"{text.tokens:,} tokens   {rate:.1f} tok/s   {text.end}")
    return texts


def prompt_ids(trained: Trained, prompt: str) -> Sequence[int]:
    """Return the token ids of the prompt; an empty prompt becomes the end-of-text token.

    Raises ConfigError if the prompt is longer than the context.
    """
    tokenizer = trained.tokenizer
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.end_of_text]
    context = trained.config.model.shape.block_size
    if len(ids) > context:
        what = f"prompt exceeds the context (expected <= {context:,} tokens, got {len(ids):,})"
        raise ConfigError(Problem(what, "PROMPT", code="usage.prompt-too-long"))
    return ids


def to_record(trained: Trained, order: Order, texts: Sequence[Text]) -> dict[str, Any]:
    """Return the texts and their settings as a JSON document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": trained.run.path.name,
        "prompt": order.prompt,
        "seed": order.seed,
        "sampling": vars(order.sampling),
        "samples": [vars(text) for text in texts],
    }


def _pieces(tokens: Iterator[int], tokenizer: Tokenizer, limit: int, text: Text) -> Iterator[str]:
    """Yield complete characters until ``limit`` tokens or end of text; update ``text``."""
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if token == tokenizer.end_of_text:
            text.end = "end_of_text"
            break
        text.tokens += 1
        if piece := characters.decode(tokenizer.token_bytes(token)):
            yield piece
        if text.tokens == limit:
            text.end = "length"
            break
    if rest := characters.decode(b"", final=True):
        yield rest
