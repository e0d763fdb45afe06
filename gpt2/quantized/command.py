"""``make evaluate``; imports torch only once the run is found and its variables are set."""

import argparse
import json
import os

from gpt2.arguments import add_json, add_variable
from gpt2.finished import find_finished
from gpt2.quantized.options import parse_schemes
from gpt2.runs import read_resolved_config
from lib.machine.setup import environment


def add_evaluating(parser: argparse.ArgumentParser) -> None:
    """Which run is evaluated, and with which weights."""
    add_variable(parser, "run", "directory of a finished run, or a pattern that names one")
    add_variable(parser, "seeds", "seeds of .config's runs, where the pattern is to choose")
    add_variable(parser, "quant", "none, int8, nf4, fp4, or several of them", "none")
    add_json(parser)


def evaluate(given: argparse.Namespace) -> str:
    """Evaluate what ``add_evaluating`` was given; the text for stdout.

    ConfigError, PreflightError or DataError where that cannot be done.
    """
    schemes = parse_schemes(given.quant)
    run = find_finished(given.run, given.build_dir, seeds=given.seeds)
    config = read_resolved_config(run)
    # Libraries read them once, at their start.
    os.environ.update(environment(config.machine))
    from gpt2.quantized.evaluate import evaluate_run, table

    summaries = [evaluate_run(run, config, given.build_dir, scheme) for scheme in schemes]
    if given.json:
        return json.dumps(summaries, sort_keys=True, allow_nan=False) + "\n"
    return table(run, summaries)
