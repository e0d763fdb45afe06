#!/usr/bin/env python3
"""Compare two finished runs from their directories.

    compare_runs.py A B                          one configuration: are the results bitwise equal?
    compare_runs.py ra baseline                  steps of .config's study: the loss difference
    compare_runs.py A B --axis RECIPROCAL        runs that differ in this symbol
    compare_runs.py A B --label-by PRECISION     runs that also differ in this, shown as a label

A run is a directory or a run name that "make plan" lists. Prints BITWISE, DIVERGED with the first
differing field, COMPARED with the paired difference A - B of the losses, or NOT COMPARABLE with every
differing field that is not in --axis or --label-by, and not set by the steps of .config's study. Exit
codes: 0 equal or compared, 1 diverged, 2 no such run or field, 4 not comparable.
"""

import os
import sys

import _start

from gpt2.planning.arguments import (
    add_json,
    add_labels,
    add_lookup,
    add_positional,
    asked_lookup,
    new_parser,
)
from gpt2.records.comparison import compare
from lib import console
from lib.report.compare import (
    CONTINUATION,
    EXIT_CODES,
    comparison_to_json,
    comparison_to_text,
)


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_lookup(parser)
    add_labels(parser)
    add_json(parser)
    for name in "AB":
        add_positional(parser, name, "a finished run")
    args = parser.parse()
    comparison = compare(
        args.A,
        args.B,
        args.build_dir,
        args.axis,
        args.label_by,
        asked_lookup(args),
    )
    columns = None if args.json else console.terminal_columns(sys.stdout)
    text = comparison_to_json(comparison) if args.json else comparison_to_text(comparison)
    console.show(console.folded(text, columns, CONTINUATION))
    return EXIT_CODES[comparison["verdict"]]


if __name__ == "__main__":
    console.run_main(main)
