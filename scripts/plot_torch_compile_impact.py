#!/usr/bin/env python3
"""Plot the effect of torch.compile on speed and GPU use, from run pairs that differ in COMPILE.

plot_torch_compile_impact.py --project kablate-single            from a W&B server
plot_torch_compile_impact.py --source local --folder results     from the run directories

Writes torch_compile_comparison.png, torch_compile_grouped.png, torch_compile_before_after.png and
<run>_vs_baseline.png for each compiled run (300 dots per inch) into --to.
"""

from pathlib import Path

import _start

from lib import cli
from lib.console import say
from lib.queries.arguments import open_source, query_parser
from lib.queries.compile_figures import draw_compile_impact
from lib.queries.compile_impact import impact_to_json, impact_to_text, read_pairs


def main() -> int:
    """Run the command line."""
    parser = query_parser(__doc__)
    parser.add_argument(
        "--run-name",
        action="append",
        default=[],
        help="only the pair with this run; repeatable",
    )
    parser.add_argument("--to", type=Path, default=Path("."), help="output folder")
    args = parser.parse_args()
    pairs = read_pairs(open_source(args), args.project, args.run_name)
    for path in draw_compile_impact(pairs, args.to):
        say("PLOT", str(path))
    print(impact_to_json(pairs) if args.json else impact_to_text(pairs), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
