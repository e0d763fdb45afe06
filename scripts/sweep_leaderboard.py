#!/usr/bin/env python3
"""Rank the runs of the sweeps that were made below OUTPUT_DIR, by validation loss.

Reads run directories alone: what differs among them is shown, seeds of the same settings are one
line. Runs that a sweep took from another study are ranked too. Runs that are not finished, or were judged on other documents, are left out and named.
"""

import _start

from gpt2.arguments import add_json, new_parser
from gpt2.config import load_config
from lib import cli
from lib.analysis.leaderboard import read_leaderboard
from lib.analysis.report import leaderboard_to_json, leaderboard_to_markdown


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    given = parser.parse_args()
    config = load_config(given.build_dir)
    folder = given.build_dir / config.study.output_dir / "sweep"
    board = read_leaderboard(folder)
    print(leaderboard_to_json(board) if given.json else leaderboard_to_markdown(board), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
