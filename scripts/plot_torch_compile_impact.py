#!/usr/bin/env python3
"""Plot the effect of torch.compile on speed and GPU use, from run pairs that differ in COMPILE.

plot_torch_compile_impact.py --project kablate-single            from a W&B server
plot_torch_compile_impact.py --source local --folder results     from the run directories

Writes torch_compile_comparison.png, torch_compile_grouped.png, torch_compile_before_after.png and
<run>_vs_baseline.png for each compiled run (300 dots per inch) into --out.
"""

from pathlib import Path

import _start

from lib import console
from lib.console import log
from lib.tracking.compile_impact import (
    compile_pairs_to_json,
    compile_pairs_to_text,
    plot_compile_impact,
    read_compile_pairs,
)
from lib.tracking.queries import open_source, query_parser


def main() -> int:
    """Run the command line."""
    parser = query_parser(__doc__)
    parser.add_argument(
        "--run-name",
        action="append",
        default=[],
        help="only the pair with this run; repeatable",
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="output folder")
    args = parser.parse_args()
    pairs = read_compile_pairs(open_source(args), args.project, args.run_name)
    for path in plot_compile_impact(pairs, args.out):
        log("PLOT", str(path))
    console.show(compile_pairs_to_json(pairs) if args.json else compile_pairs_to_text(pairs))
    return 0


if __name__ == "__main__":
    console.run_main(main)
