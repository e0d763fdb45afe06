"""Text from a finished run, as it is written."""

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
    """What to write: ``samples`` texts of at most ``tokens`` tokens each after ``prompt``.

    ConfigError where a number means nothing or the prompt is no text.
    """

    prompt: str
    tokens: int
    seed: int
    samples: int
    sampling: Sampling

    def __post_init__(self) -> None:
        counts = {"TOKENS": self.tokens, "SAMPLES": self.samples}
        problems = [
            Problem(f"{count} is not a number >= 1", name)
            for name, count in counts.items()
            if count < 1
        ]
        try:
            self.prompt.encode()
        except UnicodeEncodeError:
            problems.append(Problem("is not UTF-8", "PROMPT"))
        if problems:
            raise ConfigError(*problems)


def order(given: argparse.Namespace) -> Order:
    """What ``gpt2.arguments.add_writing`` was given. ConfigError on a value that means nothing."""
    return Order(
        given.prompt,
        tokens=int(number(given, "tokens", int)),
        seed=int(number(given, "seed", int)),
        samples=int(number(given, "samples", int)),
        sampling=Sampling(
            number(given, "temperature", float),
            top_k=int(number(given, "top_k", int)),
            top_p=number(given, "top_p", float),
        ),
    )


@dataclass
class Text:
    """One text: what stands after the prompt, of how many tokens, and why it ends."""

    seed: int
    text: str = ""
    tokens: int = 0
    # length or end_of_text, once it has ended
    end: str = "interrupted"


def write(trained: Trained, order: Order, show: Callable[[str], None]) -> list[Text]:
    """Write all texts; ``show`` gets the prompt, and each character as soon as it is whole.

    A text's randomness is decided by the seed and its number, not by how many there are.
    ConfigError where the prompt is longer than the context.
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
            # Also where Ctrl-C ends it in the middle of a line.
            show("\n")
            rate = text.tokens / (time.perf_counter() - started)
            say("DONE", f"{text.tokens:,} tokens   {rate:.1f} tok/s   {text.end}")
    return texts


def prompt_ids(trained: Trained, prompt: str) -> Sequence[int]:
    """The prompt's ids; an empty one starts where a document ends. ConfigError when too long."""
    words = trained.tokenizer
    ids = [int(i) for i in words.encode(prompt)] or [words.end_of_text]
    context = trained.config.model.shape.block_size
    if len(ids) > context:
        what = f"{len(ids):,} tokens are more than the context of {context:,}"
        raise ConfigError(Problem(what, "PROMPT"))
    return ids


def to_record(trained: Trained, order: Order, texts: Sequence[Text]) -> dict[str, Any]:
    """The JSON document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": trained.run.path.name,
        "prompt": order.prompt,
        "seed": order.seed,
        "sampling": vars(order.sampling),
        "samples": [vars(text) for text in texts],
    }


def _pieces(tokens: Iterator[int], words: Tokenizer, most: int, text: Text) -> Iterator[str]:
    """Whole characters, up to ``most`` tokens or the end of the text; counts in ``text``."""
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if token == words.end_of_text:
            text.end = "end_of_text"
            break
        text.tokens += 1
        if piece := characters.decode(words.token_bytes(token)):
            yield piece
        if text.tokens == most:
            text.end = "length"
            break
    if rest := characters.decode(b"", final=True):
        yield rest
