"""Commands ``make evaluate`` and ``make generate``; torch is imported once the run is known."""

import argparse
import codecs
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt2.data.tokenizer import Tokenizer
from gpt2.planning.arguments import RunLookup, add_json, add_variable, number
from gpt2.quantized.options import parse_schemes
from gpt2.records.run_files import find_finished, read_resolved_config
from lib.console import log
from lib.env.machine import worker_environment
from lib.errors import ConfigError, Problem
from lib.runs.seeds import stream_seed

if TYPE_CHECKING:
    from gpt2.generate import SamplingOptions
    from gpt2.weights.trained import Trained


def add_evaluation_args(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the run and the quantization schemes."""
    add_variable(parser, "run", "directory of a finished run, or a pattern that matches one")
    add_variable(parser, "seeds", "seeds of the runs in .config that the pattern can match")
    add_variable(parser, "quant", "none, int8, nf4, fp4, or several of them", "none")
    add_json(parser)


def evaluate(args: argparse.Namespace) -> str:
    """Evaluate according to the arguments of ``add_evaluation_args``; return the text for stdout.

    Raises ConfigError, PreflightError or DataError if the evaluation is not possible.
    """
    schemes = parse_schemes(args.quant)
    run = find_finished(args.run, args.build_dir, RunLookup(seeds=args.seeds))
    config = read_resolved_config(run, args.build_dir)
    # Libraries read these variables once, at import.
    os.environ.update(worker_environment(config.machine))
    from gpt2.quantized.evaluate import evaluate_run, table

    summaries = [evaluate_run(run, config, args.build_dir, scheme) for scheme in schemes]
    if args.json:
        return json.dumps(summaries, sort_keys=True, allow_nan=False) + "\n"
    return table(run, summaries)


# Text generation from a finished run, streamed while it is generated.


SCHEMA_VERSION = 1


@dataclass(frozen=True)
class GenerationRequest:
    """Text generation request: ``samples`` texts of up to ``tokens`` tokens after ``prompt``.

    Raises ConfigError if a count is below 1 or the prompt is not valid UTF-8.
    """

    prompt: str
    tokens: int
    seed: int
    samples: int
    sampling: "SamplingOptions"

    def __post_init__(self) -> None:
        counts = {"TOKENS": self.tokens, "SAMPLES": self.samples}
        problems = [
            Problem(
                f"out of range (expected at least 1, got {count})",
                name,
                "type: make help",
                code="usage.out-of-range",
            )
            for name, count in counts.items()
            if count < 1
        ]
        try:
            self.prompt.encode()
        except UnicodeEncodeError:
            problems.append(Problem("not valid UTF-8", "PROMPT", code="usage.invalid-encoding"))
        if problems:
            raise ConfigError(*problems)


def request_from_args(args: argparse.Namespace) -> GenerationRequest:
    """Build a ``GenerationRequest`` from the parsed arguments.

    Raises ConfigError if an argument is invalid.
    """
    from gpt2.generate import SamplingOptions

    return GenerationRequest(
        args.prompt,
        tokens=int(number(args, "tokens", int)),
        seed=int(number(args, "seed", int)),
        samples=int(number(args, "samples", int)),
        sampling=SamplingOptions(
            number(args, "temperature", float),
            top_k=int(number(args, "top_k", int)),
            top_p=number(args, "top_p", float),
        ),
    )


@dataclass
class GeneratedText:
    """Generated text: the continuation of the prompt, its length in tokens and the stop reason."""

    seed: int
    text: str = ""
    tokens: int = 0
    # "length" or "end_of_text" once the text is complete
    end: str = "interrupted"


def generate_texts(
    trained: "Trained", order: GenerationRequest, show: Callable[[str], None]
) -> list[GeneratedText]:
    """Generate all texts; ``show`` receives the prompt and each complete character at once.

    The randomness of a text depends on the seed and the index of the text, not on the number of
    texts. Raises ConfigError if the prompt is longer than the context.
    """
    import torch

    from gpt2.generate import generate

    prompt = encode_prompt(trained, order.prompt)
    texts = []
    for index in range(order.samples):
        if order.samples > 1:
            log("SAMPLE", f"{index + 1}/{order.samples}")
        seed = stream_seed(order.seed, f"generate/{index}")
        text = GeneratedText(seed)
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
            log("DONE", f"{text.tokens:,} tokens   {rate:.1f} tok/s   {text.end}")
    return texts


def encode_prompt(trained: "Trained", prompt: str) -> Sequence[int]:
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


def to_record(
    trained: "Trained", order: GenerationRequest, texts: Sequence[GeneratedText]
) -> dict[str, Any]:
    """Return the texts and their settings as a JSON document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": trained.run.path.name,
        "prompt": order.prompt,
        "seed": order.seed,
        "sampling": vars(order.sampling),
        "samples": [vars(text) for text in texts],
    }


def _pieces(
    tokens: Iterator[int], tokenizer: Tokenizer, limit: int, text: GeneratedText
) -> Iterator[str]:
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
