#!/usr/bin/env python3
"""Check the numbers and verdicts that documents quote against the runs of .config.

    claims.py --claims docs/claims.toml --out paper

The claims file lists statements, each with a contrast or a run, the required verdict, and the number as
quoted (docs/verdicts.md). If all hold, writes claims.tex and claims.md. Exit codes: 0 all hold, 1 a claim
does not hold, 2 the claims file is wrong, 4 records are damaged or not comparable.
"""

from pathlib import Path

import _start

from gpt2.planning.arguments import (
    add_json,
    add_selection,
    add_update,
    add_variable,
    asked_plan,
    new_parser,
)
from gpt2.records import claims
from gpt2.running import launch
from lib import console
from lib.claims.file import read_claims


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "claims", "file of the claims; default: claims.toml in the build folder")
    add_variable(parser, "out", "folder of claims.tex and claims.md; default: the study's folder")
    add_update(parser)
    add_json(parser)
    args = parser.parse()
    path = args.build_dir / claims.DEFAULT_FILE
    file = read_claims(Path(args.claims) if args.claims else path)
    if not args.seed:
        args.seeds = args.seeds or file.seeds
    _, plan = asked_plan(args)
    table = launch.result_table(plan)
    if args.update:
        file = claims.update(file, plan, table)
    code, text = claims.check(file, plan, table, out=args.out, as_json=args.json)
    console.show(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
