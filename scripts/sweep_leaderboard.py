#!/usr/bin/env python3
"""Compare the runs of all sweeps below OUTPUT_DIR, lowest validation loss first.

Reads only run directories. Shows the settings that differ between runs; seeds of the same settings
share one line. Each combination has a verdict against the one of the lowest loss, corrected for every
pair, at the numbers of seeds in VERDICT_LOOKS. Runs that a sweep reused from another study are included. Unfinished runs and runs
evaluated on other documents are skipped and listed.
"""

import sys

import _start

from gpt2.config import load_config
from gpt2.planning.arguments import add_json, new_parser
from gpt2.planning.looks import verdict_plan
from lib import console
from lib.report.leaderboard import read_leaderboard
from lib.report.table_text import leaderboard_to_json, leaderboard_to_text


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    args = parser.parse()
    config = load_config(args.build_dir)
    folder = args.build_dir / config.study.output_dir / "sweep"
    looks = config.verdicts.look_plan
    board = read_leaderboard(folder, looks, rule=verdict_plan(config, looks).rule)
    columns = None if console.is_verbose() else console.terminal_columns(sys.stdout)
    text = leaderboard_to_json(board) if args.json else leaderboard_to_text(board, columns)
    print(text, end="")
    return 0


if __name__ == "__main__":
    console.run_main(main)
