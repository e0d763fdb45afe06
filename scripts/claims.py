#!/usr/bin/env python3
"""Check the numbers and words that documents quote against the runs of .config.

    claims.py --claims docs/claims.toml --out paper

The claims file lists statements, each with a contrast and its word, or a figure of a step, as printed
(docs/verdicts.md). If all hold, writes claims.tex and claims.md. Exit codes: 0 all hold, 1 a claim does
not hold, 2 the claims file is invalid, 4 runs are damaged or not comparable.
"""

from pathlib import Path

import _start

from gpt2.planning.arguments import (
    add_json,
    add_selection,
    add_variable,
    asked_plan,
    new_parser,
)
from gpt2.records.report import study_document_of
from gpt2.running import launch
from gpt2.study.plan import table_plan
from lib import console
from lib.files import pretty_json, write_atomic
from lib.report import claims

OUTPUTS = {"claims.tex": claims.claims_to_latex, "claims.md": claims.claims_to_markdown}


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "claims", "file of the claims; default: claims.toml in the build folder")
    add_variable(parser, "out", "folder of claims.tex and claims.md; default: the study's folder")
    add_json(parser)
    args = parser.parse()
    content = claims.read_claims(Path(args.claims or args.build_dir / "claims.toml"))
    if not args.seed:
        args.seeds = args.seeds or content.get("seeds", "")
    layers, plan = asked_plan(args)
    shown = {run.path for run in plan.runs}
    table = launch.result_table(table_plan(plan, layers)).of_runs(shown)
    checked = claims.check_claims(content, study_document_of(plan, table))
    if any(claim["problems"] for claim in checked):
        console.log("SKIP", f"{' and '.join(OUTPUTS)}: not every claim holds")
    else:
        folder = Path(args.out) if args.out else plan.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in OUTPUTS.items():
            write_atomic(folder / name, text(checked))
            console.log("CLAIMS", str(folder / name))
    document = {"schema_version": 2, "claims": checked}
    console.show(pretty_json(document) if args.json else claims.claim_lines(checked))
    return claims.claims_exit_code(checked)


if __name__ == "__main__":
    console.run_main(main)
