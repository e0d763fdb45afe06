#!/usr/bin/env python3
"""Benchmark native sparse attention against full attention, for whole sequences and decoding.

    bench_nsa.py                     512 to 16384 tokens, decoding up to 65536
    bench_nsa.py --tokens 2048       up to 2048 tokens, decoding up to four times as many
    bench_nsa.py --rounds 9

Times attention only, with 12 heads of width 64 and 2 KV heads, against torch's implementation with
repeated keys and with enable_gqa; ratios are relative to the faster of the two. On a CPU: one
thread, fp32, process CPU time, interleaved; on a GPU (if available): bf16, from 8192 tokens. Each
ratio is shown with the ratio of query-key pairs, or of keys read per token; a second table shows the
growth of the time with four times the tokens.

Writes bench_nsa.csv, row by row, and bench_nsa.png to the build folder, and the table to stdout.
Progress goes to stderr; Ctrl-C exits with code 130 and reports the finished rows. Requires
matplotlib. There is no pass or fail; stop other load on the machine first.
"""

import json
from dataclasses import asdict
from importlib.metadata import version

import _start

from gpt2.bench.nsa_table import measure_in_subprocess, plot, to_markdown
from gpt2.planning.arguments import add_json, add_variable, new_parser, whole_number
from lib import console
from lib.console import log
from lib.env.gpu import cpu_model
from lib.errors import EXIT_INTERRUPTED, ConfigError, Problem
from lib.report.figures import load_pyplot

LONGEST, ROUNDS = 16384, 5


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    add_variable(parser, "tokens", f"longest sequence (default {LONGEST})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 1; 5 for publication")
    args = parser.parse_args()
    longest = whole_number(args.tokens or str(LONGEST), "TOKENS")
    if longest < 512 or args.rounds < 1:
        what = f"expected TOKENS >= 512 and --rounds >= 1, got {longest} and {args.rounds}"
        raise ConfigError(Problem(what, "TOKENS, --rounds", code="usage.out-of-range"))
    # Fail before the measurement if matplotlib is missing.
    load_pyplot()
    args.build_dir.mkdir(parents=True, exist_ok=True)
    table, figure = args.build_dir / "bench_nsa.csv", args.build_dir / "bench_nsa.png"
    device, rows, complete = measure_in_subprocess(longest, args.rounds, table)
    if rows:
        plot(rows, figure)
        log("BENCH", f"{table}, {figure}")
    machine = f"{cpu_model() if device == 'cpu' else device}, torch {version('torch')}"
    if args.json:
        records = [asdict(row) for row in rows]
        print(json.dumps({"schema_version": 1, "machine": machine, "rows": records}))
    elif rows:
        print(f"{machine}, medians of {args.rounds} rounds (range)\n\n{to_markdown(rows)}", end="")
    return 0 if complete else EXIT_INTERRUPTED


if __name__ == "__main__":
    console.run_main(main)
