#!/usr/bin/env python3
"""List every run below OUTPUT_DIR, of all studies and configurations. Starts and writes nothing.

    list_runs.py                                             one line per run
    list_runs.py --where "N_LAYER=6 val_loss<2.5 state=done" only these

Conditions compare a field (run, study, step, state, seed, iteration, val_loss, parameters, tokens,
train_seconds, finished, commit, hash) or a symbol with = != < <= > >=. A run that cannot be read is
a line with the cause. Exit codes: 0 listed, 2 invalid condition.
"""

import _start

from gpt2.ablation.resolve import resolve_config
from gpt2.planning.arguments import add_json, add_variable, new_parser
from gpt2.records.listing import list_runs, select, to_json, to_text
from lib import console
from lib.config.dotconfig import ConfigWorkspace, read_constants
from lib.config.tree import KconfigTree
from lib.project import ROOT


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "where", 'conditions, such as "N_LAYER=6 val_loss<2.5 state=done"')
    add_json(parser)
    args = parser.parse()
    place = ConfigWorkspace(ROOT, args.build_dir)
    # Runs can be listed without a configuration.
    values = (
        read_constants(place) if place.config.exists() else resolve_config(KconfigTree(), []).values
    )
    listed = select(list_runs(args.build_dir / str(values["OUTPUT_DIR"])), args.where)
    text = to_text(listed, args.where, every_column=console.is_verbose())
    print(to_json(listed) if args.json else text, end="")
    return 0


if __name__ == "__main__":
    console.run_main(main)
