#!/usr/bin/env python3
"""Compare two finished runs, from their directories alone.

    compare_runs.py A B                          the same configuration: the same bytes?
    compare_runs.py A B --axis RECIPROCAL        they differ in that alone: by how much?
    compare_runs.py A B --label-by PRECISION     they differ in that too, and it is said

A run is a directory or a name that "make plan" lists. Prints BITWISE, DIVERGED with the first field
that differs, COMPARED with the paired difference of the losses, or NOT COMPARABLE with every field
that neither --axis nor --label-by names. Exit codes: 0 the same or compared, 1 diverged, 2 no such
run or field, 4 not comparable.
"""

import os

import _start

from gpt2.arguments import add_json, add_labels, add_selection, new_parser
from gpt2.comparison import compare
from lib import cli
from lib.compare.verdict import to_json, to_text


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_labels(parser)
    add_json(parser)
    for name in "AB":
        parser.add_argument(name, nargs="?", default=os.environ.get(name, ""))
    given = parser.parse_args()
    found = compare(
        given.A,
        given.B,
        given.build_dir,
        given.axis,
        given.label_by,
        steps=given.steps,
        seeds=given.seeds,
    )
    print(to_json(found) if given.json else to_text(found), end="")
    return found.exit_code


if __name__ == "__main__":
    cli.run(main)
