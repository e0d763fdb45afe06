#!/usr/bin/env python3
"""Draw what torch.compile did to speed and GPUs: pairs of runs alike but for COMPILE.

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
    """The command line."""
    parser = query_parser(__doc__)
    parser.add_argument(
        "--run-name",
        action="append",
        default=[],
        help="only the pair that this run is part of; may be given again",
    )
    parser.add_argument("--to", type=Path, default=Path("."), help="folder of the figures")
    given = parser.parse_args()
    pairs = read_pairs(open_source(given), given.project, given.run_name)
    for path in draw_compile_impact(pairs, given.to):
        say("PLOT", str(path))
    print(impact_to_json(pairs) if given.json else impact_to_text(pairs), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
