#!/usr/bin/env python3
"""Time native sparse attention beside full attention, over whole sequences and in decoding.

    bench_nsa.py                     512 to 16384 tokens, decoding to 65536
    bench_nsa.py --tokens 2048       no longer than that, decoding to four times as many
    bench_nsa.py --rounds 9

Attention alone, 12 heads of 64 that share 2 key heads, against torch's own with repeated keys and
with enable_gqa; ratios are to the faster of the two. On a CPU: one thread, fp32, process CPU time,
interleaved; on a GPU, where there is one, bf16 from 8192 tokens on. Beside each ratio stands that of
query-key pairs, or of keys read for a token, and below how time grows with four times the tokens.

Writes bench_nsa.csv, row by row, and bench_nsa.png into the build folder, the table to stdout. How far
it is goes to stderr; Ctrl-C ends it with exit code 130, and with what it has. Needs matplotlib.
Nothing passes or fails: quiet the machine first.
"""

import json
from dataclasses import asdict
from importlib.metadata import version

import _start

from gpt2.arguments import add_json, add_variable, new_parser, whole_number
from gpt2.bench.nsa_table import draw, measure_apart, to_markdown
from lib import cli
from lib.console import say
from lib.errors import EXIT_INTERRUPTED, ConfigError
from lib.figures import pyplot
from lib.machine.devices import cpu_model

LONGEST, ROUNDS = 16384, 5


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    add_variable(parser, "tokens", f"the longest sequence, {LONGEST} unless said")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 1; 5 for a claim")
    given = parser.parse_args()
    longest = whole_number(given.tokens or str(LONGEST), "TOKENS")
    if longest < 512 or given.rounds < 1:
        raise ConfigError("TOKENS is at least 512, and --rounds at least 1")
    # What cannot be drawn should not be measured first.
    pyplot()
    given.build_dir.mkdir(parents=True, exist_ok=True)
    table, figure = given.build_dir / "bench_nsa.csv", given.build_dir / "bench_nsa.png"
    device, rows, complete = measure_apart(longest, given.rounds, table)
    if rows:
        draw(rows, figure)
        say("BENCH", f"{table}, {figure}")
    machine = f"{cpu_model() if device == 'cpu' else device}, torch {version('torch')}"
    if given.json:
        found = [asdict(row) for row in rows]
        print(json.dumps({"schema_version": 1, "machine": machine, "rows": found}))
    elif rows:
        print(f"{machine}, medians of {given.rounds} rounds (range)\n\n{to_markdown(rows)}", end="")
    return 0 if complete else EXIT_INTERRUPTED


if __name__ == "__main__":
    cli.run(main)
