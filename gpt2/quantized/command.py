"""Command ``make evaluate``; imports torch after the environment of the run is set."""

import argparse
import json
import os

from gpt2.arguments import add_json, add_variable
from gpt2.finished import find_finished
from gpt2.quantized.options import parse_schemes
from gpt2.runs import read_resolved_config
from lib.machine.setup import environment


def add_evaluating(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the run and the quantization schemes."""
    add_variable(parser, "run", "directory of a finished run, or a pattern that matches one")
    add_variable(parser, "seeds", "seeds of the runs in .config that the pattern can match")
    add_variable(parser, "quant", "none, int8, nf4, fp4, or several of them", "none")
    add_json(parser)


def evaluate(args: argparse.Namespace) -> str:
    """Evaluate according to the arguments of ``add_evaluating``; return the text for stdout.

    Raises ConfigError, PreflightError or DataError if the evaluation is not possible.
    """
    schemes = parse_schemes(args.quant)
    run = find_finished(args.run, args.build_dir, seeds=args.seeds)
    config = read_resolved_config(run)
    # Libraries read these variables once, at import.
    os.environ.update(environment(config.machine))
    from gpt2.quantized.evaluate import evaluate_run, table

    summaries = [evaluate_run(run, config, args.build_dir, scheme) for scheme in schemes]
    if args.json:
        return json.dumps(summaries, sort_keys=True, allow_nan=False) + "\n"
    return table(run, summaries)
