#!/usr/bin/env python3
"""Train one configuration twice and compare the results byte by byte.

    determinism.py                            .config; of a study, the first run
    determinism.py --steps ra                 this step of the study
    determinism.py --run DIR                  the configuration of a finished run
    determinism.py --defconfig gpt2-shakespeare

Both runs are created in the folder "determinism" of the build folder. Prints BITWISE, or DIVERGED
with the first differing field. Exit codes: 0 the same bytes, 1 diverged or failed, 2 configuration,
3 machine or data.
"""

import _start

from gpt2.planning.arguments import add_json, add_variable, new_parser
from gpt2.running.reproduce import train_twice
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "run", "directory of a finished run, or a run name that make plan lists")
    add_variable(parser, "defconfig", "this configuration (NAME[+FRAGMENT]) instead of .config")
    add_variable(parser, "steps", "step of a study")
    add_json(parser)
    args = parser.parse_args()
    code, text = train_twice(args.build_dir, args.run, args.defconfig, args.steps, json=args.json)
    print(text, end="")
    return code


if __name__ == "__main__":
    console.run_main(main)
