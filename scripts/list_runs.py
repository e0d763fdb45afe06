#!/usr/bin/env python3
"""List or remove the runs below OUTPUT_DIR, of all studies and configurations.

    list_runs.py                                             one line per run
    list_runs.py --where "N_LAYER=6 val_loss<2.5 state=done" only these
    list_runs.py clean --where "state=failed"                remove runs, after a yes

Conditions compare a field (run, study, step, state, seed, iteration, val_loss, parameters, tokens,
train_seconds, finished, commit, hash) or a symbol with = != < <= > >=; * stands for any text. A run
that cannot be read is a line with the cause. Exit codes: 0 done, 1 a run was left out, 2 invalid
condition, or not confirmed.
"""

import _start

from gpt2.planning.arguments import add_json, add_subcommands, add_variable, add_yes, new_parser
from gpt2.records.listing import list_runs, select, to_json, to_text
from gpt2.records.removal import clean_command
from gpt2.study.resolve import configured_values
from lib import console
from lib.config.dotconfig import ConfigWorkspace
from lib.errors import EXIT_DONE
from lib.project import ROOT

COMMANDS = {"clean": "remove runs, after a confirmation"}
_WHERE = 'conditions, such as "N_LAYER=6 val_loss<2.5 state=done"'


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "where", _WHERE)
    add_json(parser)
    clean = add_subcommands(parser, COMMANDS)["clean"]
    add_variable(clean, "where", _WHERE)
    add_yes(clean)
    add_json(clean)
    args = parser.parse()
    # Runs can be listed without a configuration.
    values = configured_values(ConfigWorkspace(ROOT, args.build_dir))
    folder = args.build_dir / str(values["OUTPUT_DIR"])
    if args.command == "clean":
        code, text = clean_command(args, folder)
    else:
        listed = select(list_runs(folder), args.where)
        text = to_text(listed, args.where, every_column=console.is_verbose())
        code, text = EXIT_DONE, to_json(listed) if args.json else text
    console.show(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
