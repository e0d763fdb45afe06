#!/usr/bin/env python3
"""List, remove or archive the runs below OUTPUT_DIR, of all studies and configurations.

    list_runs.py                                             one line per run
    list_runs.py --where "N_LAYER=6 val_loss<2.5 state=done" only these
    list_runs.py clean --where "state=failed"                remove runs, after a yes
    list_runs.py archive --out study.tar.gz --where study=x  write runs to one file
    list_runs.py unpack --archive study.tar.gz               add the runs of such a file

Conditions compare a field (run, study, step, state, seed, iteration, val_loss, parameters, tokens,
train_seconds, finished, commit, hash) or a symbol with = != < <= > >=; * stands for any text. A run
that cannot be read is a line with the cause. Exit codes: 0 done, 1 a run was left out, 2 invalid
condition or archive, or not confirmed.
"""

import _start

from gpt2.ablation import OWN
from gpt2.ablation.resolve import configured_values
from gpt2.planning.arguments import add_json, add_subcommands, add_variable, add_yes, new_parser
from gpt2.records import archive
from gpt2.records.listing import list_runs, select, to_json, to_text
from lib import console
from lib.config.dotconfig import ConfigWorkspace
from lib.errors import EXIT_DONE
from lib.project import ROOT

COMMANDS = {
    "clean": "remove runs, after a confirmation",
    "archive": "write runs to one file",
    "unpack": "add the runs of an archive",
}
_WHERE = 'conditions, such as "N_LAYER=6 val_loss<2.5 state=done"'


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "where", _WHERE)
    add_json(parser)
    commands = add_subcommands(parser, COMMANDS)
    for name in ("clean", "archive"):
        add_variable(commands[name], "where", _WHERE)
    add_yes(commands["clean"])
    add_variable(commands["archive"], "out", "new file, such as study.tar.gz")
    add_variable(commands["archive"], "weights", "1: include the final weights")
    add_variable(commands["unpack"], "archive", "file of make archive")
    for command in commands.values():
        add_json(command)
    args = parser.parse()
    # Runs can be listed without a configuration.
    place = ConfigWorkspace(ROOT, args.build_dir)
    values = configured_values(place)
    folder = args.build_dir / str(values["OUTPUT_DIR"])
    if args.command == "clean":
        code, text = archive.clean_command(args, folder)
    elif args.command == "archive":
        own = values.get("ABLATION_STUDY") == OWN
        study_file = args.build_dir / str(values["ABLATION_STUDY_FILE"]) if own else None
        code, text = archive.archive_command(args, folder, place.config, study_file)
    elif args.command == "unpack":
        code, text = archive.unpack_command(args, folder, place.config)
    else:
        listed = select(list_runs(folder), args.where)
        text = to_text(listed, args.where, every_column=console.is_verbose())
        code, text = EXIT_DONE, to_json(listed) if args.json else text
    print(text, end="")
    return code


if __name__ == "__main__":
    console.run_main(main)
