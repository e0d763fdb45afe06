"""The benchmarks of ``scripts/bench.py``: arguments, measurement, and text for stdout."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version

from gpt2.bench import nsa, settings, trainer
from gpt2.data.prepare import prepare_dataset
from gpt2.planning.arguments import add_json, add_variable, whole_number
from gpt2.planning.plan import config_layers
from lib.config.tree import KconfigTree
from lib.console import log
from lib.env.gpu import cpu_model, usable_cores
from lib.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, Problem
from lib.report.figures import load_pyplot

_SETTINGS_STEPS = 20
_OVERHEAD_ITERATIONS = 120
_NSA_LONGEST, _NSA_SHORTEST, _NSA_ROUNDS = 16384, 512, 5


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its arguments, and the function that returns exit code and text for stdout."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], tuple[int, str]]


def add_trainer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench_trainer``."""
    cases = list(trainer.CASES)
    add_json(parser)
    parser.add_argument("--case", nargs="*", choices=cases, default=cases)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each variant")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--no-mechanisms", action="store_true")
    parser.add_argument("--no-optimizers", action="store_true")


def bench_trainer(args: argparse.Namespace) -> tuple[int, str]:
    """Time the trainer, every mechanism and every optimizer against their counterparts."""
    if args.rounds < 1 or args.threads < 1:
        what = f"must be >= 1, got --rounds {args.rounds} --threads {args.threads}"
        raise _out_of_range(what, "--rounds, --threads")
    machine = f"{cpu_model()}, {args.threads} threads, torch {version('torch')}"
    log("BENCH", machine)
    comparisons = [
        trainer.compare(case, args.threads, args.rounds, args.build_dir) for case in args.case
    ]
    relative = {} if args.no_mechanisms else trainer.mechanisms(args.threads, args.rounds)
    updates = {} if args.no_optimizers else trainer.optimizers(args.threads, args.rounds)
    if not args.json:
        table = trainer.to_markdown(comparisons, relative, updates)
        return (
            EXIT_DONE,
            f"{machine}, medians of {args.rounds} round{'s' * (args.rounds > 1)} (range)\n\n{table}",
        )
    document = {
        "schema_version": 1,
        "machine": machine,
        "cases": [asdict(comparison) for comparison in comparisons],
        "mechanisms": relative,
        "optimizers": updates,
    }
    return EXIT_DONE, json.dumps(document, sort_keys=True, allow_nan=False) + "\n"


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench_settings``."""
    add_json(parser)
    add_variable(parser, "sym", "only these symbols and choices")
    add_variable(parser, "iters", f"timed steps (default {_SETTINGS_STEPS})")
    parser.add_argument("--rounds", type=int, default=settings.MIN_ROUNDS)


def bench_settings(args: argparse.Namespace) -> tuple[int, str]:
    """Time each speed-related setting against ``.config``, one at a time."""
    steps = whole_number(args.iters or str(_SETTINGS_STEPS), "ITERS")
    if steps < 1 or args.rounds < settings.MIN_ROUNDS:
        expected = f"ITERS >= 1 and --rounds >= {settings.MIN_ROUNDS}"
        raise _out_of_range(
            f"expected {expected}, got {steps} and {args.rounds}", "ITERS, --rounds"
        )
    variants, skipped = settings.variants(KconfigTree(), config_layers(args.build_dir), args.sym)
    prepare_dataset(variants[0].config.data, args.build_dir)
    figures = settings.measure_settings(
        variants,
        args.rounds,
        lambda variant: settings.train_variant(variant, steps, args.build_dir),
    )
    if not args.json:
        reasons = "".join(f"skipped  {problem}\n" for problem in skipped)
        return EXIT_DONE, settings.settings_to_markdown(figures) + reasons
    document = {
        "schema_version": 1,
        "arms": {name: [asdict(f) for f in rounds] for name, rounds in figures.items()},
        "left_out": [problem.what for problem in skipped],
    }
    return EXIT_DONE, json.dumps(document, sort_keys=True) + "\n"


def add_overhead_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench_overhead``."""
    add_json(parser)
    add_variable(parser, "count", f"pairs per comparison (default {settings.MIN_PAIRS})")
    add_variable(parser, "iters", f"timed iterations (default {_OVERHEAD_ITERATIONS})")


def bench_overhead(args: argparse.Namespace) -> tuple[int, str]:
    """Time the trainer's logging, and each tracker, against the same training without them."""
    pairs = whole_number(args.count or str(settings.MIN_PAIRS), "COUNT")
    iterations = whole_number(args.iters or str(_OVERHEAD_ITERATIONS), "ITERS")
    if iterations < 1 or pairs < settings.MIN_PAIRS:
        expected = f"ITERS >= 1 and COUNT >= {settings.MIN_PAIRS}"
        raise _out_of_range(f"expected {expected}, got {iterations} and {pairs}", "ITERS, COUNT")
    comparisons = settings.comparisons(KconfigTree(), config_layers(args.build_dir), iterations)
    prepare_dataset(comparisons[0].on.config.data, args.build_dir)
    results = settings.measure_overhead(
        comparisons, pairs, lambda side: settings.train_side(side, args.build_dir)
    )
    render = settings.overhead_to_json if args.json else settings.overhead_to_text
    return EXIT_DONE, render(results, iterations)


def add_nsa_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench_nsa``."""
    add_json(parser)
    add_variable(parser, "tokens", f"longest sequence (default {_NSA_LONGEST})")
    parser.add_argument(
        "--rounds", type=int, default=_NSA_ROUNDS, help="at least 1; 5 for publication"
    )


def bench_nsa(args: argparse.Namespace) -> tuple[int, str]:
    """Time sparse against full attention; write bench_nsa.csv and bench_nsa.png."""
    longest = whole_number(args.tokens or str(_NSA_LONGEST), "TOKENS")
    if longest < _NSA_SHORTEST or args.rounds < 1:
        expected = f"TOKENS >= {_NSA_SHORTEST} and --rounds >= 1"
        what = f"expected {expected}, got {longest} and {args.rounds}"
        raise _out_of_range(what, "TOKENS, --rounds")
    # Fail before the measurement if matplotlib is missing.
    load_pyplot()
    args.build_dir.mkdir(parents=True, exist_ok=True)
    table, figure = args.build_dir / "bench_nsa.csv", args.build_dir / "bench_nsa.png"
    device, rows, complete = nsa.measure_in_subprocess(longest, args.rounds, table)
    if rows:
        nsa.plot(rows, figure)
        log("BENCH", f"{table}, {figure}")
    machine = f"{cpu_model() if device == 'cpu' else device}, torch {version('torch')}"
    text = ""
    if args.json:
        records = [asdict(row) for row in rows]
        text = json.dumps({"schema_version": 1, "machine": machine, "rows": records}) + "\n"
    elif rows:
        title = f"{machine}, medians of {args.rounds} round{'s' * (args.rounds > 1)} (range)"
        text = f"{title}\n\n{nsa.to_markdown(rows)}"
    return EXIT_DONE if complete else EXIT_INTERRUPTED, text


def _out_of_range(what: str, where: str) -> ConfigError:
    return ConfigError(Problem(what, where, code="usage.out-of-range"))


# The benchmark of the trainer is the one without a name.
BENCHMARKS = {
    "": Benchmark(add_trainer_arguments, bench_trainer),
    "settings": Benchmark(add_settings_arguments, bench_settings),
    "overhead": Benchmark(add_overhead_arguments, bench_overhead),
    "nsa": Benchmark(add_nsa_arguments, bench_nsa),
}
