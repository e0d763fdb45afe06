"""``evaluate``, ``generate`` and ``export``: uses of a trained model. Imports torch once the run is found."""

import argparse
import codecs
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.quantized.options import parse_schemes
from gpt2.records.files import find_finished, read_resolved_config
from gpt2.study.arguments import RunLookup, asked_lookup
from lib.console import log, show
from lib.env.machine import worker_environment
from lib.errors import ConfigError, Problem
from lib.runs.seeds import stream_seed

if TYPE_CHECKING:
    from gpt2.weights.trained import Trained


def evaluate(args: argparse.Namespace) -> str:
    """Evaluate a finished run again, unchanged or with quantized weights.

    kablate evaluate --run ra                       unchanged: reproduces the recorded figures
    kablate evaluate --run ra --quant int8          8 bits, one scale per output
    kablate evaluate --run ra --quant nf4,fp4       4 bits; requires make setup EXTRAS=bitsandbytes

    A run is a directory, or a shell pattern that matches one run of .config. Results are written to
    evaluations/QUANT in the run directory; the files of the run are not modified. Training does not
    support quantization. Prints a table with one label per QUANT. Exit codes: 2 no such run or QUANT, 3
    a package, the data or the weights are missing.
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


def generate(args: argparse.Namespace) -> str:
    """Generate text with a finished run.

    kablate generate --run ra --prompt "The people"
    kablate generate --run results/ratio/ra-s1-0a1b2c3d --tokens 200 --temperature 0.8 --top-p 0.95
    kablate generate --run ra --temperature 0 --json

    A run is a directory, or a shell pattern over slugs, numbers and labels that matches one run of
    .config. Temperature 0 is greedy decoding; 1 samples from the unscaled distribution. The same seed
    on the same machine produces the same text. Text is streamed to stdout, log lines go to stderr. Exit
    code 2: no such run, the run is not finished, or a value is invalid.
    """
    run = find_finished(args.run, args.build_dir, RunLookup(seeds=args.seeds))
    # Imports torch, which takes longer than the search.
    from gpt2.weights.trained import open_trained

    trained = open_trained(run, args.build_dir)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    if not args.json:
        generate_texts(trained, args, show)
        return ""
    texts = generate_texts(trained, args, lambda piece: None)
    record = {
        "schema_version": 1,
        "run": run.path.name,
        "prompt": args.prompt,
        "seed": args.seed,
        "sampling": {name: vars(args)[name] for name in ("temperature", "top_k", "top_p")},
        "samples": texts,
    }
    return json.dumps(record, sort_keys=True, allow_nan=False) + "\n"


def export(args: argparse.Namespace) -> str:
    """Export the model and tokenizer of a finished run to a folder that transformers can load.

    kablate export run                                a run name in the plan of .config
    kablate export results/single/run-s1-1a2b3c4d     a run directory
    kablate export ra --seeds 2 --out models/ra       one seed, and the output folder

    The default output is the folder "export" of the run directory. A model with components that
    transformers does not support is written with its own code, for trust_remote_code=True. Prints the
    folder. Exit codes: 2 unknown or unfinished run, or the folder is in use; 3 damaged weights.
    """
    run = find_finished(args.run, args.build_dir, asked_lookup(args))
    # Imports torch: report a wrong run name without that delay.
    from gpt2.weights.export import export as export_run

    target = Path(args.out) if args.out else run.path / "export"
    export_run(run, target, args.build_dir)
    return f"{target}\n"


def generate_texts(
    trained: "Trained", args: argparse.Namespace, write: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Generate ``args.samples`` texts of up to ``args.tokens`` tokens after ``args.prompt``.

    ``write`` receives the prompt and each complete character at once. The randomness of a text depends
    on the seed and the index of the text. Raises ConfigError if the prompt is longer than the context.
    """
    import torch

    from gpt2.generate import SamplingOptions, generate

    sampling = SamplingOptions(args.temperature, top_k=args.top_k, top_p=args.top_p)
    prompt, tokenizer = encode_prompt(trained, args.prompt), trained.tokenizer
    texts = []
    for index in range(args.samples):
        if args.samples > 1:
            log("SAMPLE", f"{index + 1}/{args.samples}")
        seed = stream_seed(args.seed, f"generate/{index}")
        text: dict[str, Any] = {"seed": seed, "text": "", "tokens": 0, "end": "interrupted"}
        texts.append(text)
        tokens = generate(trained.model, torch.tensor(prompt), seed, trained.machine, sampling)
        characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        started = time.perf_counter()
        try:
            write(args.prompt)
            while text["end"] == "interrupted":
                token = next(tokens)
                if token == tokenizer.end_of_text:
                    text["end"], piece = "end_of_text", characters.decode(b"", final=True)
                else:
                    text["tokens"] += 1
                    is_last = text["tokens"] == args.tokens
                    piece = characters.decode(tokenizer.token_bytes(token), final=is_last)
                    text["end"] = "length" if is_last else text["end"]
                text["text"] += piece
                if piece:
                    write(piece)
        finally:
            # Also reached if Ctrl-C interrupts generation in the middle of a line.
            write("\n")
            rate = text["tokens"] / (time.perf_counter() - started)
            log("DONE", f"{text['tokens']:,} tokens   {rate:.1f} tok/s   {text['end']}")
    return texts


def encode_prompt(trained: "Trained", prompt: str) -> Sequence[int]:
    """Return the token ids of the prompt; an empty prompt becomes the end-of-text token.

    Raises ConfigError if the prompt is not valid UTF-8, or longer than the context.
    """
    tokenizer = trained.tokenizer
    try:
        prompt.encode()
    except UnicodeEncodeError:
        problem = Problem("not valid UTF-8", "PROMPT", code="usage.invalid-encoding")
        raise ConfigError(problem) from None
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.end_of_text]
    context = trained.config.model.shape.block_size
    if len(ids) > context:
        what = f"prompt exceeds the context (expected <= {context:,} tokens, got {len(ids):,})"
        raise ConfigError(Problem(what, "PROMPT", code="usage.prompt-too-long"))
    return ids
